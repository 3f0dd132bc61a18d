# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The chat templates of the package ``trl``, which are those of real models."""

import re
import subprocess
import sys
from collections import Counter

import pytest

from energon_ext.chats.encoding import ConversationEncoder
from energon_ext.chats.records import read_conversation
from energon_ext.errors import SampleError
from tests.chats.conversations import CONVERSATIONS
from tests.chats.reference import Reference
from tests.chats.test_matrix import FOUND, check
from tests.chats.tokenized import SPECIAL_TOKENS

pytestmark = pytest.mark.nightly

_CLOCK = re.compile(r"""strftime_now\s*\(\s*(['"]).*?\1\s*\)""")

#: Parts of messages that name something which would be missing or wrong in training.
EXPLAINED = {
    "does not write `": "a field would be missing",
    "has no reasoning": "the answer would be within a block of reasoning",
    "has reasoning": "the reasoning would follow its block",
    "does not end an answer": "a model would not learn to stop",
    "generation tags exclude": "a model would not learn to stop",
}


@pytest.fixture(scope="module")
def templates(tmp_path_factory):
    """Install the package into a folder of its own, without what it needs to train."""
    folder = tmp_path_factory.mktemp("trl")
    command = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder)
    done = subprocess.run([*map(str, command), "trl"], capture_output=True, text=True)
    found = sorted(folder.glob("trl/chat_templates/*.jinja"))
    if done.returncode or not found:
        pytest.skip("the package trl cannot be installed, or has no chat templates")
    texts = {path.stem: path.read_text(encoding="utf-8") for path in found}
    return {name: _CLOCK.sub("'31 Jan 2026'", text) for name, text in texts.items()}


@pytest.mark.parametrize("kind", ["byte BPE", "Metaspace, first"])
def test_conversations_are_accepted_or_refused_for_a_reason(kind, templates, tokenized, capsys):
    tokenizer, counts, refused = tokenized(kind), Counter(), Counter()
    FOUND.clear()
    for name, text in templates.items():
        encoder = ConversationEncoder(tokenizer.ours, tokenizer.template(text))
        for conversation, record in CONVERSATIONS.items():
            expected = Reference(SPECIAL_TOKENS, text, record)
            (found,) = encoder.encode([read_conversation(record)])
            if expected.text is None:
                continue
            counts["rendered"] += 1
            if isinstance(found, SampleError):
                why = next((part for part in EXPLAINED if part in str(found)), "another reason")
                refused[why] += 1
                continue
            counts["accepted"] += 1
            counts["one sample per answer"] += len(found.samples) > 1
            check(tokenizer, expected, found, f"{name}: {conversation}")
    with capsys.disabled():
        print(
            f"\n{len(templates)} templates, {kind}: {dict(counts | FOUND)}, refused {dict(refused)}"
        )
    assert len(templates) > 40
    unexplained = refused["another reason"]
    assert counts["accepted"] / (counts["accepted"] + unexplained) >= 0.97
