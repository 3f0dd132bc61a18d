# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""A conversation with the template that renders it: its texts and prompts."""

import dataclasses
import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from energon_ext.chats.reasoning import Block, block_at_end, has_reasoning
from energon_ext.chats.switches import add_command, find_changes
from energon_ext.chats.templates import MARK, ChatTemplate
from energon_ext.errors import SampleError


@dataclass(frozen=True)
class RenderedConversation:
    """A conversation with the template that renders it.

    Attributes:
        messages: as the template expects them.
        weights: of the messages.
        context: ``tools`` and further variables of the template.
        command: for the system message, to reason or not to; None for none.
    """

    template: ChatTemplate
    messages: Sequence[Mapping[str, Any]]
    weights: Sequence[float]
    context: Mapping[str, Any]
    command: str | None = None
    _prompts: dict[int, str] = field(default_factory=dict, init=False, compare=False)

    def mark_before(self, index: int) -> "RenderedConversation":
        """Return the conversation with a marker as the content of the message before ``index``."""
        messages = list(self.messages)
        messages[index - 1] = {**messages[index - 1], "content": MARK}
        return dataclasses.replace(self, messages=messages)

    def prompt(self, index: int) -> str:
        """Return what an inference server sees before the answer in message ``index``."""
        if index not in self._prompts:
            self._prompts[index] = self._render(index, add_generation_prompt=True)
        return self._prompts[index]

    def block(self, index: int) -> Block | None:
        """Return the block of reasoning at the end of the prompt of an answer, if there is one."""
        return block_at_end(self.prompt(index), self.template.own_tags)

    def is_fit(self, index: int) -> bool:
        """Return True if the prompt of an answer asks for reasoning just if the answer has some."""
        block = self.block(index)
        return block is None or block.fits(self.messages[index])

    def fit_prompt(self, index: int, notes: Counter[str]) -> "RenderedConversation":
        """Return the conversation with a prompt that asks for reasoning if the answer has some.

        Where the prompt opens a block of reasoning, an answer without reasoning would be trained
        inside of it, or to end it at once; where it closes one, reasoning would follow its end.

        Raises:
            SampleError: nothing changes the prompt so, or somebody has asked for it as it is.
        """
        if self.is_fit(index):
            return self
        block = self.block(index)
        reasons = block is not None and has_reasoning(self.messages[index], block)
        changes = find_changes(self.template, self.messages, self.context, reasons)
        for name, context, command in changes:
            changed = dataclasses.replace(self, context=context, command=command)
            try:
                is_fit = changed.is_fit(index)
            except SampleError:  # the template rejects the value
                continue
            if is_fit:
                kind = "with" if reasons else "without"
                notes[f"answers {kind} reasoning, prompted with {name}"] += 1
                return changed
        if reasons:
            raise SampleError(
                f"message {index} has reasoning, but the generation prompt closes the block of it; "
                f"remove the reasoning, or what asks for none (enable_thinking false or the like)"
            )
        raise SampleError(
            f"message {index} has no reasoning, but the generation prompt opens a block of it; "
            f"give `reasoning_content`, or use a template that opens none"
        )

    def begin_of(self, index: int, text: str, prompt: str) -> int:
        """Return where an answer begins in a text that begins with its prompt.

        After another answer some templates write no generation prompt, but then the same words as
        the beginning of the message. A model does not write them.

        Raises:
            SampleError: the template continues the answer before, or writes other words.
        """
        begin = len(prompt)
        if not index or self.messages[index - 1]["role"] != "assistant":
            return begin
        before = self._render(index)
        if before == prompt and text.startswith(self._header, begin):
            return begin + len(self._header)
        if before.startswith(prompt):
            raise SampleError(
                f"message {index}: the chat template has no prompt for an answer after another "
                f"one; put both into one message, or use another template"
            )
        return begin

    @functools.cached_property
    def _header(self) -> str:
        """Text that the prompt of the first answer adds, without a block of reasoning."""
        after_question = (i for i in self.assistants if i and i - 1 not in self.assistants)
        first = next(after_question, self.assistants[0])
        before = self._render(first)
        prompt, block = self.prompt(first), self.block(first)
        stop = len(prompt) if block is None else block.start
        return prompt[len(before) : stop] if prompt.startswith(before) else ""

    def until(self, index: int) -> tuple[str, list[tuple[int, int]]]:
        """Return the text up to message ``index``, and the places of its generation tags."""
        return self.template.render_answers(self._first(index + 1), **self.context)

    def _render(self, stop: int, **how: bool) -> str:
        return self.template.render(self._first(stop), **how, **self.context)

    def _first(self, stop: int) -> Sequence[Mapping[str, Any]]:
        """Return the first messages, with the command."""
        messages = self.messages[:stop]
        return messages if self.command is None else add_command(messages, self.command)

    @functools.cached_property
    def assistants(self) -> list[int]:
        """Indices of all answers."""
        return [i for i, message in enumerate(self.messages) if message["role"] == "assistant"]

    @property
    def last_question(self) -> int:
        """Index of the last message before the first trained answer that is not an answer."""
        before = range(self.answers[0])
        return max(index for index in before if index not in self.assistants)

    @functools.cached_property
    def answers(self) -> list[int]:
        """Indices of the answers that are trained."""
        return [index for index in self.assistants if self.weights[index] > 0]
