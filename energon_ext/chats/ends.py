# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Find out what a chat template writes after an answer.

As for :mod:`~energon_ext.chats.written`, a template is asked once for each kind of beginning.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from energon_ext.chats.templates import MARK, ChatTemplate
from energon_ext.chats.written import describe_variables
from energon_ext.errors import SampleError

#: Answers about kinds of conversations that are kept.
_MAX_KNOWN = 1 << 15


class AnswerEnds:
    """The text that one chat template writes after answers."""

    def __init__(self, template: ChatTemplate):
        self._template = template
        self._known: dict[Any, Any] = {}

    def find_end(self, head: Sequence[Any], context: Mapping[str, Any]) -> str | None:
        """Return the text after the content of an answer; None if the template does not tell."""
        key = "end", _kind_of(head), describe_variables(context)
        if key not in self._known:
            marked = {"role": "assistant", "content": MARK}
            try:
                text = self._template.render([*head, marked], **context)
            except SampleError:
                return None
            self._remember(key, text.rpartition(MARK)[2] if MARK in text else None)
        return self._known[key]

    def check_end(self, head: Sequence[Any], context: Mapping[str, Any]) -> None:
        """Raise SampleError if the template writes the prompt of another answer after an answer.

        Args:
            head: the messages before an answer, the last of which is not an answer.
        """
        key = "unasked", _kind_of(head), describe_variables(context)
        if key not in self._known:
            try:
                self._remember(key, self._writes_prompt_unasked(head, context))
            except SampleError:  # a template may reject this conversation if it goes on
                return
        if self._known[key]:
            raise SampleError(
                "the chat template writes the next generation prompt, or a part of it, whether or "
                "not it is asked for, so it would be trained as the end of an answer; use a "
                "template that writes it only `if add_generation_prompt`"
            )

    def _remember(self, key: Any, value: Any) -> None:
        if len(self._known) > _MAX_KNOWN:
            self._known.clear()
        self._known[key] = value

    def _writes_prompt_unasked(self, head: Sequence[Any], context: Mapping[str, Any]) -> bool:
        """Return True if an answer ends like a question, and goes on differently in a history.

        What an answer ends with is then in two parts: one that stays when the conversation goes on,
        and one that is written after a question as well, where the generation prompt continues it.
        """
        render = self._template.render
        asked = render(head, **context)
        if not render(head, add_generation_prompt=True, **context).startswith(asked):
            return False
        answer = {"role": "assistant", "content": MARK}
        texts = [
            render(messages, **context)
            for messages in ([*head, answer], [*head, answer, {"role": "user", "content": "?"}])
        ]
        if not all(MARK in text for text in texts):
            return False
        answered, continued = (text.rpartition(MARK)[2] for text in texts)
        if continued.startswith(answered):
            return False
        stays = len(os.path.commonprefix([answered, continued]))
        is_as_asked = len(os.path.commonprefix([answered[::-1], asked[::-1]]))
        return stays > 0 and stays + is_as_asked >= len(answered)


def _kind_of(messages: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, ...], ...]:
    """Return the roles of messages and their fields."""
    return tuple((m["role"], *sorted(name for name in m if m[name])) for m in messages)
