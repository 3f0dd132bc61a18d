# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Find out which fields a chat template writes, so that none disappears silently.

A template is asked once for each kind of field: the field is replaced by a marker, and the marker
must appear in the text. An answer is asked about as the last message, where templates drop nothing;
any other message in the prompt of the next answer, since some templates write it only there.
Comparing every message instead would refuse conversations that are right, because most templates
drop the reasoning of earlier answers.

What a template writes may depend on the roles and fields of all messages before and on the
variables, so all of that is part of the kind. Other conversations are not: what a conversation
becomes does not depend on which ones came first.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from energon_ext.chats.forms import find_other_forms
from energon_ext.chats.marks import TEXTS, mark_texts, swap
from energon_ext.chats.messages import LABELS, Messages
from energon_ext.chats.reasoning import REASONING_FIELDS, block_at_end
from energon_ext.chats.rendered import RenderedConversation
from energon_ext.chats.templates import ChatTemplate
from energon_ext.chats.tool_forms import (
    check_schemas,
    find_form_of_calls,
    need_other_form,
    writes_tools,
)
from energon_ext.errors import SampleError

#: Sequences of roles and fields, and answers about them, that are kept.
_MAX_KNOWN = 1 << 17


class WrittenFields:
    """The fields that one chat template writes; it is asked once for each kind of field."""

    def __init__(self, template: ChatTemplate):
        self._template = template
        self._known: dict[Any, Any] = {}
        self._sequences: dict[Any, int] = {}

    def messages_for(self, checked: Messages, context: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the messages in the form that the template expects, all fields of which it writes.

        Raises:
            SampleError: the template rejects the messages, or does not write a field.
        """
        if max(len(self._known), len(self._sequences)) > _MAX_KNOWN:
            self._known.clear()
            self._sequences.clear()
        variables = describe_variables(context)
        messages = list(checked.rendered)
        for index, calls in checked.original_calls.items():
            form, is_other = self._form_of_calls(messages, index, context, variables)
            calls = calls if form == TEXTS else messages[index]["tool_calls"]
            messages[index] = {**messages[index], "tool_calls": swap(calls) if is_other else calls}
        messages = self._with_contents(messages, context, variables)
        for index in range(len(messages)):
            self._bring_to_form(messages, index, context, variables, checked.notes)
        if context.get("tools"):
            self._check_tools(messages, context, variables)
        return messages

    def with_tools(self, context: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the variables with ``tools`` in the form of which the template writes all.

        They are functions, or objects with a ``function``; which is used only if it is written and
        the given form is not.
        """
        tools = context.get("tools")
        if not tools:
            return context
        check_schemas(tools)
        variables = describe_variables(context)
        key = "form of tools", "function" in tools[0], len(tools), variables
        if key not in self._known:
            self._known[key] = need_other_form(self._template, context)
        return {**context, "tools": swap(tools)} if self._known[key] else context

    def find_unused(self, variables: Mapping[str, Any]) -> list[str]:
        """Return the names of variables that the template does not read."""
        known = self._template.variables()
        return [name for name in variables if name not in known]

    def _kinds(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return a number for nothing, and for the roles and fields up to each message."""
        kinds = [0]
        for message in messages:
            given = sorted(name for name, value in message.items() if value)
            step = kinds[-1], message["role"], *given
            kinds.append(self._sequences.setdefault(step, len(self._sequences) + 1))
        return kinds

    def _with_contents(
        self, messages: list[dict[str, Any]], context: Mapping[str, Any], variables: str
    ) -> list[dict[str, Any]]:
        """Give an empty content to messages without one, if the template needs that."""
        without = [message for message in messages if "content" not in message]
        if not without:
            return messages
        filled = _fill_contents(messages)
        key = "content", self._kinds(messages)[-1], variables
        if key not in self._known:
            try:
                self._known[key] = self._needs_content(messages, filled, context)
            except SampleError:  # perhaps for what is in these messages, which others may not have
                return filled
        return filled if self._known[key] else messages

    def _needs_content(
        self,
        messages: Sequence[Mapping[str, Any]],
        filled: Sequence[Mapping[str, Any]],
        context: Mapping[str, Any],
    ) -> bool:
        """Return True if the template fails without a content, or writes None for it.

        SampleError if it fails with one as well.
        """
        try:
            text = self._template.render(messages, **context)
        except SampleError:
            self._template.render(filled, **context)
            return True
        if "None" not in text:
            return False
        return text.count("None") > self._template.render(filled, **context).count("None")

    def _form_of_calls(
        self,
        messages: Sequence[Mapping[str, Any]],
        index: int,
        context: Mapping[str, Any],
        variables: str,
    ) -> tuple[str, bool]:
        """Return how the template takes tool calls.

        Returns:
            Whether it takes arguments as objects or as texts, and whether it needs a ``function``
            in calls that have none, or the other way around.
        """
        calls = messages[index]["tool_calls"]
        is_bare = "function" not in calls[0]
        key = self._kinds(messages[: index + 1])[-1], "tool_calls", len(calls), is_bare, variables
        if key not in self._known:
            head = _fill_contents(messages[:index])
            self._known[key] = find_form_of_calls(self._template, head, messages[index], context)
        if self._known[key] is None:
            raise _unwritten_error(index, "tool_calls", "assistant")
        return self._known[key]

    def _bring_to_form(
        self,
        messages: list[dict[str, Any]],
        index: int,
        context: Mapping[str, Any],
        variables: str,
        notes: Counter[str],
    ) -> None:
        """Replace a message by the first of its forms of which the template writes all fields."""
        kinds, stop = self._kinds(messages), _stop_of_probe(messages, index)
        for name, value in list(messages[index].items()):
            if not value or not isinstance(value, (str, list, dict)):
                continue
            if name in LABELS or name == "tool_calls":
                continue
            if name not in messages[index]:  # a second name of a text, which has moved
                continue
            key = kinds[stop], stop - index, name, type(value).__name__, variables
            if key not in self._known:
                self._known[key] = self._find_form(messages, index, name, context)
            form = self._known[key]
            if form is None:
                raise _unwritten_error(index, name, messages[index]["role"], self._template)
            if form:
                forms = list(find_other_forms(self._template, messages[index], name))
                note, _, changed = forms[form - 1]
                notes[note] += 1
                messages[index] = dict(changed)

    def _find_form(
        self,
        messages: Sequence[Mapping[str, Any]],
        index: int,
        name: str,
        context: Mapping[str, Any],
    ) -> int | None:
        """Return 0 if a field is written as it is, else the number of a form in which it is."""
        rejection = None
        try:
            if self._is_written(messages, index, name, context):
                return 0
        except SampleError as error:  # perhaps of this form only, such as a role
            rejection = error
        marked, marks = _mark_field(messages[index], name)
        if isinstance(marked.get("content"), str) and name != "content":
            marked["content"] = mark_texts(marked["content"], marks) if marked["content"] else ""
        for number, (_, place, changed) in enumerate(
            find_other_forms(self._template, marked, name), 1
        ):
            if place == "content" != name and self._fills_block(messages, index, context):
                return 0  # the last resort is not needed
            try:
                text = self._render_probe(messages, index, changed, context)
            except SampleError as error:
                rejection = rejection or error
                continue
            if str(changed[place]).strip() in text:
                return number
        if rejection is not None:
            raise rejection
        is_filled = name in REASONING_FIELDS and self._fills_block(messages, index, context)
        return 0 if is_filled else None

    def _is_written(
        self,
        messages: Sequence[Mapping[str, Any]],
        index: int,
        name: str,
        context: Mapping[str, Any],
    ) -> bool:
        marked, marks = _mark_field(messages[index], name)
        text = self._render_probe(messages, index, marked, context)
        return bool(marks) and all(mark in text for mark in marks)

    def _render_probe(
        self,
        messages: Sequence[Mapping[str, Any]],
        index: int,
        message: Mapping[str, Any],
        context: Mapping[str, Any],
    ) -> str:
        """Return the text of the messages around one, with another in its place."""
        probe = [*messages[:index], message, *messages[index + 1 : _stop_of_probe(messages, index)]]
        is_answer = message["role"] == "assistant"
        return self._template.render(probe, add_generation_prompt=not is_answer, **context)

    def _fills_block(
        self, messages: Sequence[Mapping[str, Any]], index: int, context: Mapping[str, Any]
    ) -> bool:
        """Return True if the prompt opens a block, into which the reasoning of an answer is put."""
        conversation = RenderedConversation(self._template, messages, (), context)
        try:
            prompt = conversation.fit_prompt(index, Counter()).prompt(index)
        except SampleError:
            return False
        block = block_at_end(prompt, self._template.own_tags)
        return block is not None and not block.is_closed

    def _check_tools(
        self, messages: Sequence[Mapping[str, Any]], context: Mapping[str, Any], variables: str
    ) -> None:
        tools = context["tools"]
        is_bare = isinstance(tools[0], Mapping) and "function" not in tools[0]
        first = next((i for i, m in enumerate(messages) if m["role"] == "assistant"), None)
        key = "tools", self._kinds(messages[:first])[-1], is_bare, len(tools) > 1, variables
        if key not in self._known:
            self._known[key] = writes_tools(self._template, messages[:first], is_bare, context)
        if not self._known[key]:
            raise SampleError(
                "the chat template does not write `tools`; use a template that does "
                "(--chat-template), or put them into a system message"
            )


def _mark_field(message: Mapping[str, Any], name: str) -> tuple[dict[str, Any], list[str]]:
    """Return a message with markers in a field, and the markers."""
    marks: list[str] = []
    marked = {**message, name: mark_texts(message[name], marks)}
    if name in REASONING_FIELDS:  # names for the same text, of which a template reads one
        marked |= {n: marked[name] for n in REASONING_FIELDS if message.get(n) == message[name]}
    return marked, marks


def describe_variables(context: Mapping[str, Any]) -> str:
    """Return a text that differs if a template may write other fields."""
    if not context:
        return ""
    return json.dumps({**context, "tools": bool(context.get("tools"))}, sort_keys=True, default=str)


def _stop_of_probe(messages: Sequence[Mapping[str, Any]], index: int) -> int:
    """Return the number of messages in which a field of one is looked for.

    They end with an answer itself, and otherwise before the next answer.
    """
    roles = [message["role"] for message in messages]
    if roles[index] == "assistant" and "user" in roles[:index]:
        return index + 1
    # Before the first question there may be a greeting; some templates reject it alone.
    first = max(index + 1, roles.index("user") + 1 if "user" in roles else 0)
    return next((i for i in range(first, len(roles)) if roles[i] == "assistant"), len(roles))


def _fill_contents(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages, with an empty content for those without one."""
    return [{"content": "", **message} for message in messages]


#: What else to do about a field that a template does not write.
_REMEDIES = {
    "tool_calls": "or put the calls into `content` as the model should write them",
    "content": "or move its text into another message",
    **dict.fromkeys(REASONING_FIELDS, "or remove the reasoning"),
}


def _unwritten_error(
    index: int, name: str, role: str, template: ChatTemplate | None = None
) -> SampleError:
    remedy = _REMEDIES.get(name, "or remove the field")
    if template is not None and name in REASONING_FIELDS and template.own_reasoning[1]:
        names = ", ".join(template.own_reasoning[1])
        remedy = f"or give it as the template reads it, perhaps as {names}"
    return SampleError(
        f"message {index}: the chat template does not write `{name}` of role {role}; use a "
        f"template that does (--chat-template), {remedy}"
    )
