# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The forms of tools and tool calls that a chat template writes in full.

Functions stand alone or within OpenAI's ``{"type": "function", "function": …}``, arguments are
objects or JSON text. Records have any of these forms, and templates read some of them.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from energon_ext.chats.marks import OBJECTS, TEXTS, mark_calls, mark_tools, swap
from energon_ext.chats.templates import ChatTemplate
from energon_ext.errors import SampleError


def find_form_of_calls(
    template: ChatTemplate,
    head: Sequence[Mapping[str, Any]],
    message: Mapping[str, Any],
    context: Mapping[str, Any],
) -> tuple[str, bool] | None:
    """Return how a template takes the tool calls of an answer; None if it does not write them.

    Args:
        head: the messages before.

    Returns:
        Whether it takes arguments as objects or as texts, and whether it needs calls with a
        ``function`` where they have none, or the other way around. The given form is tried first.

    Raises:
        SampleError: the template rejects all forms.
    """
    rejections = []
    for is_other, form in itertools.product((False, True), (OBJECTS, TEXTS)):
        calls = swap(message["tool_calls"]) if is_other else message["tool_calls"]
        calls, marks, wrong = mark_calls(calls, form)
        try:
            probe = {"content": "", **message, "tool_calls": calls}
            text = template.render([*head, probe], **context)
        except SampleError as error:
            rejections.append(error)
            continue
        if all(mark in text for mark in marks) and not any(each in text for each in wrong):
            return form, is_other
    if len(rejections) == 4:
        raise rejections[0]
    return None


def need_other_form(template: ChatTemplate, context: Mapping[str, Any]) -> bool:
    """Return True if a template writes ``tools`` in the other form only, see :func:`swap`."""
    is_bare = "function" not in context["tools"][0]
    return [_writes(template, bare, context) for bare in (is_bare, not is_bare)] == [False, True]


def _writes(template: ChatTemplate, is_bare: bool, context: Mapping[str, Any]) -> bool:
    try:
        return writes_tools(template, [{"role": "user", "content": "x"}], is_bare, context)
    except SampleError:
        return False


def writes_tools(
    template: ChatTemplate,
    head: Sequence[Mapping[str, Any]],
    is_bare: bool,
    context: Mapping[str, Any],
) -> bool:
    """Return True if a template writes all of the tools before an answer to some messages."""
    marked, marks = mark_tools(len(context["tools"]), is_bare)
    text = template.render(head, add_generation_prompt=True, **{**context, "tools": marked})
    return all(mark in text for mark in marks)


def check_schemas(tools: Sequence[Any]) -> None:
    """Raise SampleError unless all tools are functions as JSON schemas."""
    for number, tool in enumerate(tools):
        function = tool.get("function", tool) if isinstance(tool, Mapping) else tool
        if not isinstance(function, Mapping):
            raise SampleError(f"tools[{number}] must be a function as a JSON schema")
