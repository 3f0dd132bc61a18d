# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Faults of a sample that its text shows, without knowing how it was made."""

import json
import re

from energon_ext.tokenizers.tokenizers import ByteTokenizer

BYTES = ByteTokenizer()
_BEGIN = re.compile(r"<think>|\[THINK\]|<\|START_THINKING\|>|<\|channel>thought|<seed:think>", re.I)
_END = re.compile(r"</think>|\[/THINK\]|<\|END_THINKING\|>|<channel\|>|</seed:think>", re.I)
_REASONING = ("reasoning_content", "reasoning", "thinking")


def find_faults(record, samples):
    """Return what is wrong with the samples of a record, which are encoded as bytes."""
    pieces = [_pieces(*sample) for sample in samples]
    trained = _squeeze("".join(text for sample in pieces for text, weight in sample if weight))
    messages = record["messages"]
    answers = [m for m in messages if m["role"] == "assistant" and m.get("weight", 1) > 0]
    found = [
        f"not trained: {part!r}"
        for message in answers
        for text in _texts(message)
        for part in re.split("</?think>", text)
        if not any(_squeeze(form) in trained for form in (part, json.dumps(part)[1:-1]))
    ]
    found += [
        f"trained from role {message['role']}: {message['content']!r}"
        for message in messages
        if message["role"] != "assistant" and len(message["content"]) > 8
        if isinstance(message["content"], str) and _squeeze(message["content"]) in trained
    ]
    has_end = any("think>" in str(message.get("content")) for message in answers)
    for sample in pieces:
        before = ""
        for text, weight in sample:
            found += _faults_of_block(before, text, has_end) if weight else []
            before += text
    return found


def _faults_of_block(before, text, has_end):
    """Return what is wrong with the block of reasoning of a trained text."""
    begins = [match.end() for match in _BEGIN.finditer(before)]
    ends = [match.end() for match in _END.finditer(before)]
    opened, closed = _BEGIN.search(text), _END.search(text)
    is_inside = begins and (not ends or ends[-1] < begins[-1]) and not before[begins[-1] :].strip()
    if is_inside and closed is None:
        return [f"a block is never closed: {before[-30:]!r} {text[:60]!r}"]
    if is_inside and not text[: closed.start()].strip():
        return [f"an empty block is trained: {text[:60]!r}"]
    if is_inside and opened and opened.start() < closed.start():
        return [f"a block is opened twice: {text[:60]!r}"]
    if (
        not is_inside
        and closed
        and not has_end
        and not (opened and opened.start() < closed.start())
    ):
        return [f"a block is closed that was not open: {before[-30:]!r} {text[:60]!r}"]
    return []


def _pieces(tokens, weights):
    """Return the text of a sample in pieces that are trained or not."""
    borders = [0, *(weights[1:] != weights[:-1]).nonzero()[0] + 1, len(tokens)]
    return [
        (BYTES.show(tokens[start:stop]), bool(weights[start] > 0))
        for start, stop in zip(borders, borders[1:])
    ]


def _texts(message):
    content = message.get("content") or ""
    texts = [content if isinstance(content, str) else "".join(part["text"] for part in content)]
    texts += [message[name] for name in _REASONING if message.get(name)]
    return texts + [call["function"]["name"] for call in message.get("tool_calls") or ()]


def _squeeze(text):
    return re.sub(r"\s+", "", text)
