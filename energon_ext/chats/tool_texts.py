# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Find what a template leaves out of the descriptions of tools.

Few templates write all of a JSON schema: some leave out nested properties or the values of an enum,
and most leave out parameters that are not under ``properties``. A model is prompted with the same
text, so this is no reason to refuse a conversation, but people should know.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from energon_ext.chats.reasoning import is_said

#: Keywords of JSON schemas under which there are names of parameters.
_OF_NAMES = ("properties", "$defs", "definitions")
#: Keywords that are no names of parameters, even if their values are objects.
_KEYWORDS = (*_OF_NAMES, "items", "additionalProperties", "default", "not", "if", "then", "else")


def find_lost(tools: Sequence[Any], text: str) -> str | None:
    """Return what kind of text of some tools is not in a text; None if it has everything.

    Example:
        >>> schema = {"properties": {"city": {"description": "A town.", "enum": ["Oban"]}}}
        >>> tools = [{"type": "function", "function": {"name": "tide", "parameters": schema}}]
        >>> find_lost(tools, "tide(city: str)  # A town.")
        'a value of an enum'
    """
    for tool in tools:
        function = tool.get("function", tool)
        for kind, value in _texts_of(function.get("parameters")):
            if not is_said(value, text):
                return kind
    return None


def _texts_of(schema: Any) -> Iterator[tuple[str, str]]:
    """Yield the texts of a schema with what each is, in the order in which it has them."""
    if isinstance(schema, list):
        for each in schema:
            yield from _texts_of(each)
    if not isinstance(schema, dict):
        return
    for key, value in schema.items():
        if key == "description" and isinstance(value, str):
            yield "a description of a parameter", value
        elif key == "enum" and isinstance(value, list):
            yield from (("a value of an enum", each) for each in value if isinstance(each, str))
        elif key in _OF_NAMES and isinstance(value, dict):
            for name, each in value.items():
                yield "the name of a parameter", name
                yield from _texts_of(each)
        elif isinstance(value, (dict, list)):
            if isinstance(value, dict) and key not in _KEYWORDS:
                yield "the name of a parameter", key
            yield from _texts_of(value)
