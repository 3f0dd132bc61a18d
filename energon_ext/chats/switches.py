# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Find out how a chat template is asked to reason, or not to.

Each family has a variable of its own (``enable_thinking``, ``thinking``, ``reasoning_effort``) or a
command in the system message (``/no_think``). Names say little about what they do, so the template
itself is asked: a caller tries these changes in order, and takes the first whose generation prompt
fits the answer.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from energon_ext.chats.templates import RESERVED, ChatTemplate

#: Values that variables of reasoning take: on, off.
_VALUES: dict[bool, tuple[Any, ...]] = {True: (True, "high"), False: (False, "none", "no_think")}

#: Commands in a system message.
_COMMANDS = {True: "/think", False: "/no_think"}

#: Variables that hold text or data.
_DATA = ("tools", "documents", "bos_token", "eos_token")

_ABOUT_REASONING = re.compile("think|reason", re.IGNORECASE)


def find_changes(
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    context: Mapping[str, Any],
    reasons: bool,
) -> Iterator[tuple[str, Mapping[str, Any], str | None]]:
    """Yield changes that may turn reasoning on or off, the likely ones first.

    What the conversation or the user asks for is not changed.

    Yields:
        What to call the change, the variables, and a command for the system message.
    """
    variables = template.variables()
    given = variables & {*context, *template.template_kwargs}
    if any(map(_ABOUT_REASONING.search, given)):
        return
    names = variables - RESERVED - given - {*_DATA}
    likely_first = sorted(names, key=lambda name: (not _ABOUT_REASONING.search(name), name))
    for value in _VALUES[reasons]:
        for name in likely_first:
            shown = value if isinstance(value, str) else json.dumps(value)
            yield f"{name} {shown}", {**context, name: value}, None
    if not _has_command(messages):
        command = _COMMANDS[reasons]
        yield f"{command} in the system message", context, command


def add_command(messages: Sequence[Mapping[str, Any]], command: str) -> list[Mapping[str, Any]]:
    """Return messages with a command at the end of their system message, which may be a new one."""
    if not messages or messages[0]["role"] != "system":
        return [{"role": "system", "content": command}, *messages]
    first = messages[0]
    return [{**first, "content": f"{first['content']} {command}".strip()}, *messages[1:]]


def remove_commands(text: str) -> str:
    """Return a text without the commands to reason or not to.

    Example:
        >>> remove_commands("Be brief. /no_think")
        'Be brief.'
    """
    for command in _COMMANDS.values():
        text = text.replace(command, "")
    return text.strip()


def _has_command(messages: Sequence[Mapping[str, Any]]) -> bool:
    contents = [str(message.get("content")) for message in messages]
    return any(command in content for content in contents for command in _COMMANDS.values())
