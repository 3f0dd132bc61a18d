# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Find out which fields a chat template writes, so that none disappears silently.

A template is asked once for each kind of field: the field is replaced by a marker in the last
message, where templates drop nothing, and the marker must appear in the text. Comparing every
message instead would refuse conversations that are right, since most templates drop the reasoning
of earlier answers.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from energon_ext.chats.messages import LABELS, Messages
from energon_ext.chats.templates import ChatTemplate
from energon_ext.errors import SampleError

#: Begins every marker: letters that no template adds, escapes or changes.
_MARK = "zqxjkv"

#: Objects or texts, as arguments of tool calls.
OBJECTS, TEXTS = "objects", "texts"


class WrittenFields:
    """The fields that one chat template writes; it is asked once for each kind of field."""

    def __init__(self, template: ChatTemplate):
        self._template = template
        self._known: dict[Any, Any] = {}

    def messages_for(self, checked: Messages, context: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the messages in the form that the template expects, all fields of which it writes.

        Raises:
            SampleError: the template rejects the messages, or does not write a field.
        """
        messages = checked.rendered
        if checked.original_calls and self._form_of_calls(checked, context) == TEXTS:
            messages = checked.with_text_arguments()
        messages = self._with_contents(messages, context)
        for index in range(len(messages)):
            self._check_message(messages, index, context)
        if context.get("tools"):
            self._check_tools(messages, context)
        return messages

    def unused(self, variables: Mapping[str, Any]) -> list[str]:
        """Return the names of variables that the template does not read."""
        known = self._template.variables()
        return [name for name in variables if name not in known]

    def end_of_answers(self, head: Sequence[Any], context: Mapping[str, Any]) -> str | None:
        """Return the text after the content of an answer; None if the template does not tell."""
        if "end" not in self._known:
            marked = {"role": "assistant", "content": _MARK}
            try:
                text = self._template.render([*head, marked], **context)
            except SampleError:
                return None
            self._known["end"] = text.rpartition(_MARK)[2] if _MARK in text else None
        return self._known["end"]

    def _with_contents(
        self, messages: list[dict[str, Any]], context: Mapping[str, Any]
    ) -> list[dict[str, Any]]:
        """Give an empty content to messages without one, if the template needs that."""
        if all("content" in message for message in messages):
            return messages
        filled = [{"content": "", **message} for message in messages]
        key = "content", tuple(message["role"] for message in messages if "content" not in message)
        if key not in self._known:
            try:
                self._template.render(messages, **context)
                self._known[key] = False
            except SampleError:
                self._template.render(filled, **context)
                self._known[key] = True
        return filled if self._known[key] else messages

    def _form_of_calls(self, checked: Messages, context: Mapping[str, Any]) -> str:
        """Return whether the template takes the arguments of tool calls as objects or as texts."""
        index = min(checked.original_calls)
        message = checked.rendered[index]
        key = "tool_calls", len(message["tool_calls"]) > 1
        if key not in self._known:
            self._known[key] = self._ask_for_calls(checked, index, context)
        if self._known[key] is None:
            raise _not_written(index, "tool_calls", message["role"])
        return self._known[key]

    def _ask_for_calls(
        self, checked: Messages, index: int, context: Mapping[str, Any]
    ) -> str | None:
        head, message, rejections = checked.rendered[:index], checked.rendered[index], []
        for form in (OBJECTS, TEXTS):
            calls, marks, wrong = _marked_calls(message["tool_calls"], form)
            try:
                probe = {"content": "", **message, "tool_calls": calls}
                text = self._template.render([*head, probe], **context)
            except SampleError as error:
                rejections.append(error)
                continue
            if all(mark in text for mark in marks) and not any(each in text for each in wrong):
                return form
        if len(rejections) == 2:
            raise rejections[0]
        return None

    def _check_message(
        self, messages: Sequence[Mapping[str, Any]], index: int, context: Mapping[str, Any]
    ) -> None:
        message = messages[index]
        before = messages[index - 1]["role"] if index else None
        others = bool(message.get("content")), bool(message.get("tool_calls"))
        for name, value in message.items():
            if name in LABELS or name == "tool_calls" or not isinstance(value, (str, list, dict)):
                continue
            if not value:
                continue
            key = before, message["role"], name, type(value).__name__, others
            if key not in self._known:
                self._known[key] = self._is_written(messages, index, name, context)
            if not self._known[key]:
                raise _not_written(index, name, message["role"])

    def _is_written(
        self,
        messages: Sequence[Mapping[str, Any]],
        index: int,
        name: str,
        context: Mapping[str, Any],
    ) -> bool:
        marks: list[str] = []
        marked = {**messages[index], name: _marked(messages[index][name], marks)}
        try:
            text = self._template.render([*messages[:index], marked], **context)
        except SampleError:  # the template may refuse to end with this message
            text = self._template.render(
                [*messages[:index], marked, *messages[index + 1 :]], **context
            )
        return bool(marks) and all(mark in text for mark in marks)

    def _check_tools(
        self, messages: Sequence[Mapping[str, Any]], context: Mapping[str, Any]
    ) -> None:
        tools = context["tools"]
        if "tools" not in self._known:
            marks = [f"{_MARK}{number}" for number in range(3)]
            schema = {"type": "object", "properties": {marks[2]: {"type": "string"}}}
            function = {"name": marks[0], "description": marks[1], "parameters": schema}
            is_bare = isinstance(tools[0], Mapping) and "function" not in tools[0]
            marked = function if is_bare else {"type": "function", "function": function}
            first = next((i for i, m in enumerate(messages) if m["role"] == "assistant"), None)
            text = self._template.render(
                messages[:first], add_generation_prompt=True, **{**context, "tools": [marked]}
            )
            self._known["tools"] = all(mark in text for mark in marks)
        if not self._known["tools"]:
            raise SampleError(
                "the chat template does not write `tools`; use a template that does, or remove them"
            )


def _not_written(index: int, name: str, role: str) -> SampleError:
    return SampleError(
        f"message {index}: the chat template does not write `{name}` of role {role}; use a "
        f"template that does, or remove the field"
    )


def _marked(value: Any, marks: list[str]) -> Any:
    """Return a value with a marker of its own in place of each text."""
    if isinstance(value, str):
        marks.append(f"{_MARK}{len(marks)}")
        return marks[-1]
    if isinstance(value, Mapping):
        return {key: each if key in LABELS else _marked(each, marks) for key, each in value.items()}
    if isinstance(value, list):
        return [_marked(each, marks) for each in value]
    return value


def _marked_calls(calls: Sequence[Any], form: str) -> tuple[list[Any], list[str], list[str]]:
    """Return tool calls made of markers, the markers, and texts that show a wrong form."""
    marked, marks, wrong = [], [], []
    for number, call in enumerate(calls):
        name, key, value = (f"{_MARK}{number}{letter}" for letter in "nkv")
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
