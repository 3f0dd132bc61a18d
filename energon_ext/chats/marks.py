# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Messages and tools made of markers, which show what a chat template writes."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from energon_ext.chats.messages import LABELS
from energon_ext.chats.templates import MARK

#: Forms of the arguments of tool calls.
OBJECTS, TEXTS = "objects", "texts"


def wrap(function: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call or a schema of a function as an object of OpenAI's, with a ``function``.

    Example:
        >>> wrap({"id": "7", "name": "add", "arguments": {"a": 1}})
        {'id': '7', 'type': 'function', 'function': {'name': 'add', 'arguments': {'a': 1}}}
    """
    around = {name: value for name, value in function.items() if name in ("id", "type")}
    inner = {name: value for name, value in function.items() if name not in around}
    return {**around, "type": "function", "function": inner}


def unwrap(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return the function of a call or schema, with what is around it: undo :func:`wrap`."""
    around = {name: value for name, value in call.items() if name not in ("type", "function")}
    return {**around, **call["function"]}


def swap(calls: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return calls or schemas with a ``function`` if they have none, and without it otherwise."""
    return [unwrap(each) if "function" in each else wrap(each) for each in calls]


def mark_texts(value: Any, marks: list[str]) -> Any:
    """Return a value with a marker of its own in place of each text."""
    if isinstance(value, str):
        marks.append(f"{MARK}{len(marks)}t")
        return marks[-1]
    if isinstance(value, Mapping):
        return {
            key: each if key in LABELS else mark_texts(each, marks) for key, each in value.items()
        }
    if isinstance(value, list):
        return [mark_texts(each, marks) for each in value]
    return value


def mark_calls(calls: Sequence[Any], form: str) -> tuple[list[Any], list[str], list[str]]:
    """Return tool calls made of markers, the markers, and texts that show a wrong form."""
    marked, marks, wrong = [], [], []
    for number, call in enumerate(calls):
        name, key, value = (f"{MARK}{number}{letter}" for letter in "nkv")
        arguments: Any = {key: value}
        # Python's own form of a dict is no JSON, and text within JSON text has escaped quotes.
        wrong += [f"'{key}': '{value}'", f'\\"{key}\\"']
        if form == TEXTS:
            arguments = json.dumps(arguments)
        function = {"name": name, "arguments": arguments}
        bare = {k: v for k, v in call.items() if k not in ("function", "name", "arguments")}
        marked.append(
            {**bare, "function": function} if "function" in call else {**bare, **function}
        )
        marks += [name, key, value]
    return marked, marks, wrong


def mark_tools(count: int, is_bare: bool) -> tuple[list[Any], list[str]]:
    """Return tools made of markers, and the markers."""
    marked, marks = [], []
    for number in range(count):
        name, description, key = (f"{MARK}{number}{letter}" for letter in "ndk")
        # Templates may rely on all that a complete schema has.
        parameter = {"type": "string", "description": "A text."}
        schema = {"type": "object", "properties": {key: parameter}, "required": [key]}
        function = {"name": name, "description": description, "parameters": schema}
        marked.append(function if is_bare else {"type": "function", "function": function})
        marks += [name, description, key]
    return marked, marks
