# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Other forms of a message, for templates that do not write a field as it is given.

Each keeps all of the message: reasoning under the name that the template reads, or within the
content as models such as DeepSeek R1 write it; a developer's message as the system's, which is its
former name; a result of role ``function`` as one of role ``tool``, which is its later name.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from energon_ext.chats.reasoning import REASONING_FIELDS
from energon_ext.chats.templates import ChatTemplate

Message = Mapping[str, Any]


def find_other_forms(
    template: ChatTemplate, message: Message, name: str
) -> Iterator[tuple[str, str, Message]]:
    """Yield other forms of a message: what to count, the field that has the text, and the message.

    Args:
        name: the field that is not written as it is.

    Example:
        >>> from energon_ext.chats.templates import PlainChatTemplate
        >>> message = {"role": "assistant", "content": "4", "reasoning": "2 + 2"}
        >>> forms = find_other_forms(PlainChatTemplate(), message, "reasoning")
        >>> [changed for _, _, changed in forms][-1]
        {'role': 'assistant', 'content': '<think>\\n2 + 2\\n</think>\\n\\n4'}
    """
    value, role = message[name], message["role"]
    if name == "content" and role == "developer":
        note = "messages of role developer, written as those of role system"
        yield note, name, {**message, "role": "system"}
    if name == "content" and role == "function":
        note = "messages of role function, written as those of role tool"
        yield note, name, {**message, "role": "tool"}
    if name not in REASONING_FIELDS or not isinstance(value, str):
        return
    if any(message.get(other, value) != value for other in REASONING_FIELDS):
        return  # two texts, neither of which may disappear
    rest = {key: each for key, each in message.items() if key not in REASONING_FIELDS}
    for other in REASONING_FIELDS:
        if other not in message:
            yield f"`{name}` of answers, written as `{other}`", other, {**rest, other: value}
    found, unwritten = template.own_reasoning
    if found is not None and found.field not in (*REASONING_FIELDS, *message):
        note = f"`{name}` of answers, written as `{found.field}`"
        yield note, found.field, {**message, found.field: value}
    if role == "assistant" and found is None and not unwritten:
        thought, said = value.strip("\n"), message.get("content") or ""
        content = f"<think>\n{thought}\n</think>\n\n{said}"
        note = f"`{name}` of answers, written as <think> in their content"
        yield note, "content", {**rest, "content": content}
