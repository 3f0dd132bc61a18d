# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Contents with parts of type ``thinking``, as Mistral and Anthropic store reasoning.

A template that reads such parts writes tags around them. The content becomes the same text with
these tags. For any other template, the reasoning before an answer moves to the field of reasoning,
which is then written as the template reads it.
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
        head, message = rendered[:index], rendered[index]
        head = [{"content": "", **each} for each in head]
        tags = _tags(template, head, message, context)
        if tags is None:
            if not _is_reasoning(message, parts):
                raise SampleError(
                    f"message {index}: the chat template does not write reasoning that is given "
                    f"as parts of type '{THINKING}' of role {message['role']}; use a template that "
                    f"does, or make the parts one text, with the tags that the model uses"
                )
            text = "".join(text for kind, text in parts[1:])
            rendered[index] = {**message, "content": text, REASONING_FIELDS[0]: parts[0][1]}
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
    # Some templates print a part that they do not read, with the name of its type, as JSON.
    is_printed = any(f"{quote}{THINKING}{quote}" in opening for quote in "'\"")
    return (opening, closing) if found and not is_printed else None


def _is_reasoning(message: Mapping[str, Any], parts: Sequence[tuple[str, str]]) -> bool:
    """Return True if the first part, and no other one, is the reasoning of an answer."""
    is_thought = [kind == THINKING for kind, _ in parts]
    is_first = is_thought[0] and not any(is_thought[1:])
    is_answer = message["role"] == "assistant"
    return is_answer and is_first and not any(message.get(name) for name in REASONING_FIELDS)
