# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Contents with parts of type ``thinking``, as Mistral and Anthropic store reasoning.

A template that reads such parts writes tags around them. The content becomes the same text with
these tags. For any other template, the reasoning before an answer becomes ``reasoning_content``.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from energon_ext.chats.messages import THINKING, Messages
from energon_ext.chats.reasoning import REASONING_FIELDS
from energon_ext.chats.templates import MARK, ChatTemplate
from energon_ext.errors import SampleError

_THOUGHT, _SAID = f"{MARK}0r", f"{MARK}1r"


def write_thinking_parts(
    template: ChatTemplate, checked: Messages, context: Mapping[str, Any]
) -> Messages:
    """Return messages whose contents are text.

    Raises:
        SampleError: the template does not read the parts, and they are not the reasoning before an
            answer.
    """
    if not checked.parts:
        return checked
    rendered = list(checked.rendered)
    for index, parts in checked.parts.items():
        message = rendered[index]
        tags = _tags(template, rendered[:index], message, context)
        if tags is None:
            rendered[index] = _with_reasoning(index, message, parts)
            continue
        opening, closing = tags
        texts = (f"{opening}{text}{closing}" if kind == THINKING else text for kind, text in parts)
        rendered[index] = {**message, "content": "".join(texts)}
    return dataclasses.replace(checked, rendered=rendered, parts={})


def _tags(
    template: ChatTemplate,
    head: Sequence[Mapping[str, Any]],
    message: Mapping[str, Any],
    context: Mapping[str, Any],
) -> tuple[str, str] | None:
    """Return what a template writes around the thought of a message; None if it does not."""
    thought = {"type": THINKING, THINKING: _THOUGHT}
    head = [{"content": "", **each} for each in head]
    contents: tuple[Any, ...] = (_SAID, [thought, {"type": "text", "text": _SAID}])
    try:
        plain, written = (
            template.render([*head, {**message, "content": content}], **context)
            for content in contents
        )
    except SampleError:
        return None
    before, found, after = plain.partition(_SAID)
    if not found or not written.startswith(before) or not written.endswith(f"{_SAID}{after}"):
        return None
    between = written[len(before) : len(written) - len(_SAID) - len(after)]
    opening, found, closing = between.partition(_THOUGHT)
    return (opening, closing) if found else None


def _with_reasoning(
    index: int, message: Mapping[str, Any], parts: Sequence[tuple[str, str]]
) -> dict[str, Any]:
    """Return an answer whose first part is its reasoning with that under ``reasoning_content``."""
    kinds = [kind for kind, _ in parts]
    is_first = kinds[0] == THINKING and THINKING not in kinds[1:]
    is_answer = message["role"] == "assistant"
    if not (is_answer and is_first) or any(message.get(name) for name in REASONING_FIELDS):
        raise SampleError(
            f"message {index}: the chat template does not write parts of type 'thinking' of role "
            f"{message['role']}; use a template that does, or make the parts one text with the "
            f"tags that the model uses for reasoning"
        )
    text = "".join(text for kind, text in parts if kind != THINKING)
    return {**message, "content": text, "reasoning_content": parts[0][1]}
