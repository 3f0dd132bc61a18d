# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Chat templates of real models: those of the package ``trl``, and those of a folder.

Set ``ENERGON_EXT_TEMPLATES`` to a folder with ``.jinja`` files to try others.
"""

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from energon_ext.chats.encoding import ConversationEncoder
from energon_ext.chats.records import read_conversation
from energon_ext.errors import ConfigError, SampleError
from tests.chats.conversations import CONVERSATIONS, MORE
from tests.chats.faults import find_faults
from tests.chats.reference import Reference, in_other_form
from tests.chats.test_matrix import FOUND, check
from tests.chats.tokenized import SPECIAL_TOKENS

pytestmark = pytest.mark.nightly

_CLOCK = re.compile(r"""strftime_now\s*\(\s*(['"]).*?\1\s*\)""")

#: Parts of messages, and what would be missing or wrong in training.
REASONS = {
    "does not write `tool_calls`": "the call would not be trained",
    "does not write `tools`": "the model would not see its tools",
    "does not write `reasoning": "the reasoning would not be trained",
    "does not write `thinking`": "the reasoning would not be trained",
    "does not write `content`": "a message would be missing",
    "writes only a part of": "a part of the answer would not be trained",
    "has no reasoning, but": "the answer would be within a block of reasoning",
    "has reasoning, but": "the reasoning would follow its block",
    "after other text of an answer": "the reasoning would be repeated",
    "whether or not it is asked for": "the next header would be trained",
    "does not continue its own": "an answer would follow a prompt that no server makes",
    "has no prompt for an answer after another": "the header of the answer would be trained",
    "tags exclude": "the end would not be trained",
    "the chat template rejects": "the template rejects the history of an answer",
}


@pytest.fixture(scope="module")
def templates(tmp_path_factory):
    """Install the package into a folder of its own, without what it needs to train."""
    folder = tmp_path_factory.mktemp("trl")
    command = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder)
    subprocess.run([*map(str, command), "trl"], capture_output=True, text=True)
    found = sorted(folder.glob("trl/chat_templates/*.jinja"))
    if own := os.environ.get("ENERGON_EXT_TEMPLATES"):
        found += sorted(Path(own).glob("*.jinja"))
    if not found:
        pytest.skip("the package trl cannot be installed, or has no chat templates")
    texts = {path.stem: path.read_text(encoding="utf-8") for path in found}
    return {name: _CLOCK.sub("'31 Jan 2026'", text) for name, text in texts.items()}


@pytest.mark.parametrize("kind", ["bytes", "byte BPE", "Metaspace, first"])
def test_conversations_are_trained_as_they_are_or_refused_for_a_reason(
    kind, templates, tokenized, capsys
):
    tokenizer, counts, refused, faults = tokenized(kind), Counter(), Counter(), []
    FOUND.clear()
    for name, text in templates.items():
        try:
            encoder = ConversationEncoder(tokenizer.ours, tokenizer.template(text))
        except ConfigError:
            continue  # transformers cannot read it either
        for conversation, record in {**CONVERSATIONS, **MORE}.items():
            expected = Reference(SPECIAL_TOKENS, text, record)
            (found,) = encoder.encode([read_conversation(record)])
            if expected.text is None:
                continue
            counts["rendered"] += 1
            if isinstance(found, SampleError):
                refused[next((part for part in REASONS if part in str(found)), str(found))] += 1
                continue
            counts["accepted"] += 1
            counts["one sample per answer"] += len(found.samples) > 1
            if kind == "bytes":
                problems = find_faults(record, found.samples)
                faults += [f"{name}: {conversation}: {problem}" for problem in problems]
            other = in_other_form(record, found.notes)
            if other != record:
                expected = Reference(SPECIAL_TOKENS, text, other)
            try:
                check(tokenizer, expected, found, f"{name}: {conversation}")
            except AssertionError as error:  # go on, to report all
                faults.append(f"{str(error):.120}" if str(error) else f"{name}: {conversation}")
    with capsys.disabled():
        print(f"\n{len(templates)} templates, {kind}: {dict(counts | FOUND)}")
        for reason, count in refused.most_common():
            print(f"{count:6} {reason}: {REASONS.get(reason, '?')}")
        print(*faults, sep="\n")
    assert len(templates) > 40
    assert not faults
    assert set(refused) <= set(REASONS)
    assert sum(refused.values()) <= 0.2 * counts["rendered"]
