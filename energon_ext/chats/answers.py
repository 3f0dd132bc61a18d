# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Find the answers in the text of a conversation.

An answer begins where the generation prompt ends, since that is where the model continues at
inference. Three ways are tried in order:

1. one text: the prompt of each answer begins the text, and the answer is what its message adds; if
   the template has generation tags that begin at the same place, they say where the answer ends;
2. one text, by tags: the template shows an earlier answer in another form (most drop earlier
   reasoning), but a generation tag begins where its prompt ends;
3. one text per answer, with the history as the template shows it at that point.

Where a prompt opens a block of reasoning that the template does not repeat in front of an answer,
:mod:`~energon_ext.chats.reasoning` joins the prompt and the answer.
"""

import dataclasses
import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from energon_ext.chats.reasoning import (
    REASONING_FIELDS,
    block_at_end,
    continue_block,
    has_thought,
    is_said,
)
from energon_ext.chats.templates import MARK, ChatTemplate
from energon_ext.chats.tokenization import AnsweredText, Span
from energon_ext.errors import SampleError

#: All answers of a conversation in one text, only its last one, or one text per answer.
ALL, LAST, EACH = "all", "last", "each"
ANSWERS = (ALL, LAST, EACH)


@dataclass(frozen=True)
class RenderedConversation:
    """A conversation with the template that renders it.

    Attributes:
        messages: as the template expects them.
        weights: of the messages.
        context: ``tools`` and further variables of the template.
    """

    template: ChatTemplate
    messages: Sequence[Mapping[str, Any]]
    weights: Sequence[float]
    context: Mapping[str, Any]

    def mark_before(self, index: int) -> "RenderedConversation":
        """Return the conversation with a marker as the content of the message before ``index``."""
        messages = list(self.messages)
        messages[index - 1] = {**messages[index - 1], "content": MARK}
        return dataclasses.replace(self, messages=messages)

    def prompt(self, index: int) -> str:
        """Return what an inference server sees before the answer in message ``index``."""
        return self.template.render(
            self.messages[:index], add_generation_prompt=True, **self.context
        )

    def begin_of(self, index: int, text: str, prompt: str) -> int:
        """Return where an answer begins in a text that begins with its prompt.

        After another answer some templates write no generation prompt, but then the same words as
        the beginning of the message. A model does not write them.
        """
        begin = len(prompt)
        if index and self.messages[index - 1]["role"] == "assistant":
            before = self.template.render(self.messages[:index], **self.context)
            if before == prompt and text.startswith(self._header, begin):
                begin += len(self._header)
        return begin

    @functools.cached_property
    def _header(self) -> str:
        """Text that the prompt of the first answer adds, without a block of reasoning."""
        after_question = (i for i in self.assistants if i and i - 1 not in self.assistants)
        first = next(after_question, self.assistants[0])
        before = self.template.render(self.messages[:first], **self.context)
        prompt = self.prompt(first)
        block = block_at_end(prompt)
        stop = len(prompt) if block is None else block.start
        return prompt[len(before) : stop] if prompt.startswith(before) else ""

    def until(self, index: int) -> tuple[str, list[tuple[int, int]]]:
        """Return the text up to message ``index``, and the places of its generation tags."""
        return self.template.render_answers(self.messages[: index + 1], **self.context)

    @functools.cached_property
    def assistants(self) -> list[int]:
        """Indices of all answers."""
        return [i for i, message in enumerate(self.messages) if message["role"] == "assistant"]

    @functools.cached_property
    def answers(self) -> list[int]:
        """Indices of the answers that are trained."""
        return [index for index in self.assistants if self.weights[index] > 0]


def find_answers(
    conversation: RenderedConversation, choice: str | None, notes: Counter[str]
) -> list[AnsweredText]:
    """Return the texts of a conversation with their answers.

    Args:
        choice: ``all``, ``last`` or ``each``; None for the first way that is possible.
        notes: counts what a summary should say.

    Raises:
        SampleError: the answers cannot be found in this way.
    """
    answers = conversation.answers
    if choice == LAST:
        _count_left_out(conversation, notes)
        return [text_of_answer(conversation, answers[-1], notes)]
    if choice != EACH:
        found = _one_text(conversation, notes)
        if found is not None:
            return [found]
        if choice == ALL:
            raise SampleError(
                "the chat template rewrites earlier text, so the answers are not in one text; "
                "use answers='each' (--answers each), one sample per answer"
            )
        notes["conversations with one sample per answer, since the template rewrites"] += 1
    _count_left_out(conversation, notes)
    return [text_of_answer(conversation, index, notes) for index in answers]


def _count_left_out(conversation: RenderedConversation, notes: Counter[str]) -> None:
    """Count the messages after the last answer that is trained; nothing depends on them."""
    if left := conversation.assistants[-1] - conversation.answers[-1]:
        notes["messages after the last trained answer, left out"] += left


def _one_text(conversation: RenderedConversation, notes: Counter[str]) -> AnsweredText | None:
    """Return the whole conversation as one text; None if it does not have all answers."""
    last = conversation.assistants[-1]
    text, tags = conversation.until(last)
    spans = []
    for index in conversation.answers:
        prompt = conversation.prompt(index)
        if not text.startswith(prompt):
            return None
        _check_block(conversation.messages[index], index, prompt)
        begin, weight = conversation.begin_of(index, text, prompt), conversation.weights[index]
        answered = text if index == last else conversation.until(index)[0]
        is_kept = len(answered) >= begin and text.startswith(answered)
        end = len(answered) if is_kept else _next_answer(conversation, index, text)
        tagged = [] if end is None else _tags_within(tags, begin, end, notes)
        if not tagged and not is_kept:
            return None
        check_said(conversation.messages[index], index, answered[begin:])
        spans += [Span(*place, weight) for place in tagged or [(begin, len(answered))]]
    _count_dropped(conversation, last, text, notes)
    return AnsweredText(text, spans)


def _next_answer(conversation: RenderedConversation, index: int, text: str) -> int | None:
    """Return where the next answer begins, the end of the text for none; None if it is unknown."""
    following = next((other for other in conversation.assistants if other > index), None)
    if following is None:
        return len(text)
    prompt = conversation.prompt(following)
    return len(prompt) if text.startswith(prompt) else None


def text_of_answer(
    conversation: RenderedConversation, index: int, notes: Counter[str]
) -> AnsweredText:
    """Return the text up to one answer, which alone is trained."""
    prompt, weight = conversation.prompt(index), conversation.weights[index]
    text, tags = conversation.until(index)
    if not text.startswith(prompt):
        text, prompt = _join(conversation, index, prompt, text, notes)
        tags = []
    _check_block(conversation.messages[index], index, prompt)
    begin = conversation.begin_of(index, text, prompt)
    check_said(conversation.messages[index], index, text[begin:])
    _count_dropped(conversation, index, text, notes)
    tagged = _tags_within(tags, begin, len(text), notes)
    spans = tagged or [(begin, len(text))]
    return AnsweredText(text, [Span(start, stop, weight) for start, stop in spans])


def _tags_within(
    tags: Sequence[tuple[int, int]], begin: int, end: int, notes: Counter[str]
) -> list[tuple[int, int]]:
    """Return the generation tags of an answer if they begin where its prompt ends."""
    inside = [tag for tag in tags if begin <= tag[0] and tag[1] <= end]
    if not tags or (inside and inside[0][0] == begin):
        return inside
    notes["answers whose generation tag does not begin where the prompt ends"] += 1
    return []


def _join(
    conversation: RenderedConversation, index: int, prompt: str, text: str, notes: Counter[str]
) -> tuple[str, str]:
    """Return a text made of a prompt and an answer that the template shows elsewhere; the prompt.

    Either the prompt opens a block of reasoning, or the template shows earlier messages in another
    form once the answer follows (gpt-oss: the reasoning of earlier calls in the same turn).
    """
    joined = _continue_prompt(conversation, index, prompt, text)
    if joined is not None:
        return joined, prompt
    block = block_at_end(prompt)
    if block is None:
        raise SampleError(
            f"message {index}: the chat template does not continue its own generation prompt with "
            f"the answer; use another template, or one with generation tags"
        )
    if block.is_closed:
        raise _closed_error(index)
    if "enable_thinking" not in conversation.context:
        off = dataclasses.replace(
            conversation, context={**conversation.context, "enable_thinking": False}
        )
        disabled = off.prompt(index)
        joined = _continue_prompt(off, index, disabled, off.until(index)[0])
        if disabled != prompt and joined is not None:
            notes["answers without reasoning, prompted with enable_thinking false"] += 1
            return joined, disabled
    raise SampleError(
        f"message {index} has no reasoning, but the generation prompt opens a block of it; give "
        f"`reasoning_content`, or a template with the variable enable_thinking"
    )


def _continue_prompt(
    conversation: RenderedConversation, index: int, prompt: str, text: str
) -> str | None:
    """Return a prompt with what the template writes after it for an answer; None if unclear."""
    if text.startswith(prompt):
        return text
    block = block_at_end(prompt)
    head = len(prompt) if block is None else block.start
    if not text.startswith(prompt[:head]):
        # What precedes differs. Compare only what follows the message before the answer.
        marked = conversation.mark_before(index)
        before, after = marked.prompt(index), marked.until(index)[0]
        before, after = before.rpartition(MARK)[2], after.rpartition(MARK)[2]
        head = len(before) - (len(prompt) - head)
        if head < 0 or not after.startswith(before[:head]):
            return None
        text = after
    shown = text[head:]
    if block is None:
        return prompt + shown
    return continue_block(prompt, block, shown, conversation.messages[index])


def _check_block(message: Mapping[str, Any], index: int, prompt: str) -> None:
    """Raise SampleError if a content has reasoning, but its prompt closes the block of it."""
    block = block_at_end(prompt)
    content = message.get("content")
    if block and block.is_closed and isinstance(content, str) and has_thought(content, block):
        raise _closed_error(index)


def _closed_error(index: int) -> SampleError:
    return SampleError(
        f"message {index} has reasoning, but the generation prompt closes the block of it; remove "
        f"the reasoning, or give enable_thinking true"
    )


def check_said(message: Mapping[str, Any], index: int, answer: str) -> None:
    """Raise SampleError if the text of a trained answer lacks a part of its content or reasoning.

    Templates that split a content at the end of a block of reasoning may drop what precedes it.
    """
    for name in ("content", *REASONING_FIELDS):
        value = message.get(name)
        if isinstance(value, str) and not is_said(value, answer):
            raise SampleError(
                f"message {index}: the chat template writes only a part of `{name}`; does it "
                f"split it at the end of a block of reasoning? Put reasoning under "
                f"`reasoning_content`, or use another template"
            )


def _count_dropped(
    conversation: RenderedConversation, last: int, text: str, notes: Counter[str]
) -> None:
    """Count the texts of earlier messages that the template does not show any more."""
    for message in conversation.messages[:last]:
        names = ("content", *REASONING_FIELDS) if message["role"] == "assistant" else ("content",)
        missing = [name for name in names if not _is_shown(message.get(name), text)]
        if not all(_is_shown(name, text) for name in _names_of_calls(message)):
            missing.append("tool_calls")
        for name in missing:
            if message["role"] in ("system", "developer"):
                raise SampleError(
                    f"the chat template does not write a message of role {message['role']} in its "
                    f"place; move it to the beginning, or use a template that writes it"
                )
            notes[f"earlier `{name}` of role {message['role']}, dropped or changed"] += 1


def _is_shown(value: Any, text: str) -> bool:
    return not isinstance(value, str) or is_said(value, text)


def _names_of_calls(message: Mapping[str, Any]) -> list[Any]:
    return [call.get("function", call)["name"] for call in message.get("tool_calls", ())]
