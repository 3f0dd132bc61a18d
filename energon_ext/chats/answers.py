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
the text of that answer is its prompt, the reasoning, the end of the block, and the content.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from energon_ext.chats.templates import ChatTemplate
from energon_ext.chats.tokenization import AnsweredText, Span
from energon_ext.errors import SampleError

#: All answers of a conversation in one text, only its last one, or one text per answer.
ALL, LAST, EACH = "all", "last", "each"
ANSWERS = (ALL, LAST, EACH)

REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
#: The end of a prompt that opens a block of reasoning, such as ``<think>`` or ``[THINK]``.
_OPENED = re.compile(r"(?:<([A-Za-z]\w*)>|\[([A-Z]+)\])(\s*)\Z")


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

    def prompt(self, index: int, **variables: Any) -> str:
        """Return what an inference server sees before the answer in message ``index``."""
        context = {**self.context, **variables}
        return self.template.render(self.messages[:index], add_generation_prompt=True, **context)

    def until(self, index: int, **variables: Any) -> tuple[str, list[tuple[int, int]]]:
        """Return the text up to message ``index``, and the places of its generation tags."""
        context = {**self.context, **variables}
        return self.template.render_answers(self.messages[: index + 1], **context)

    @property
    def answers(self) -> list[int]:
        """Indices of the messages that are trained."""
        return [
            index
            for index, message in enumerate(self.messages)
            if message["role"] == "assistant" and self.weights[index] > 0
        ]


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
    return [text_of_answer(conversation, index, notes) for index in answers]


def _one_text(conversation: RenderedConversation, notes: Counter[str]) -> AnsweredText | None:
    """Return the whole conversation as one text; None if a prompt does not begin it."""
    messages = conversation.messages
    last = max(i for i, message in enumerate(messages) if message["role"] == "assistant")
    text, tags = conversation.until(last)
    begins, ends = [], []
    for index in conversation.answers:
        prompt = conversation.prompt(index)
        answered = text if index == last else conversation.until(index)[0]
        if not text.startswith(prompt):
            return None
        is_kept = answered.startswith(prompt) and text.startswith(answered)
        begins.append(len(prompt))
        ends.append(len(answered) if is_kept else None)
    spans = []
    for number, (index, begin, end) in enumerate(zip(conversation.answers, begins, ends)):
        following = begins[number + 1] if number + 1 < len(begins) else len(text)
        weight = conversation.weights[index]
        tagged = _tags_within(tags, begin, following if end is None else end, notes)
        if tagged:
            spans += [Span(start, stop, weight) for start, stop in tagged]
        elif end is not None:
            spans.append(Span(begin, end, weight))
        else:
            return None
    _count_dropped(conversation, last, text, notes)
    return AnsweredText(text, spans)


def text_of_answer(
    conversation: RenderedConversation, index: int, notes: Counter[str]
) -> AnsweredText:
    """Return the text up to one answer, which alone is trained."""
    prompt, weight = conversation.prompt(index), conversation.weights[index]
    text, tags = conversation.until(index)
    if not text.startswith(prompt):
        text, prompt = _with_reasoning(conversation, index, prompt, text)
        tags = []
    _count_dropped(conversation, index, text, notes)
    tagged = _tags_within(tags, len(prompt), len(text), notes)
    spans = tagged or [(len(prompt), len(text))]
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


def _with_reasoning(
    conversation: RenderedConversation, index: int, prompt: str, text: str
) -> tuple[str, str]:
    """Return the text of an answer whose prompt opens a block of reasoning, and the prompt."""
    opened = _OPENED.search(prompt)
    head = prompt[: opened.start()] if opened else prompt
    if opened is None or not text.startswith(head):
        raise SampleError(
            f"message {index}: the chat template does not continue its own generation prompt with "
            f"the answer; use another template, or one with generation tags"
        )
    tag, space = prompt[opened.start() : opened.start(3)], opened[3]
    closing = f"</{opened[1]}>" if opened[1] else f"[/{opened[2]}]"
    rest = text[len(head) :]
    if rest.startswith(tag):  # the template repeats the block, with other white space
        return prompt + rest[len(tag) :].lstrip("\n"), prompt
    message = conversation.messages[index]
    content = str(message.get("content", ""))
    reasoning = next((message[name] for name in REASONING_FIELDS if message.get(name)), None)
    if reasoning is not None:
        thought = reasoning.strip() + space
        return f"{prompt}{thought}{closing}{2 * space}{rest.lstrip()}", prompt
    thought, closed, final = content.rpartition(closing)
    if closed:  # the content has the block itself, with its own white space
        thought = thought.lstrip().removeprefix(tag).lstrip("\n")
        between = final[: len(final) - len(final.lstrip())]
        return f"{prompt}{thought}{closing}{between}{rest.lstrip()}", prompt
    return _without_reasoning(conversation, index, prompt)


def _without_reasoning(
    conversation: RenderedConversation, index: int, prompt: str
) -> tuple[str, str]:
    """Return the text of an answer without reasoning, and its prompt with reasoning disabled."""
    disabled = conversation.prompt(index, enable_thinking=False)
    text, _ = conversation.until(index, enable_thinking=False)
    if disabled != prompt:
        if text.startswith(disabled):
            return text, disabled
        # The prompt contains a block that is already closed.
        opened = re.search(r"(?:<[A-Za-z]\w*>|\[[A-Z]+\])\s*(?:</\w+>|\[/[A-Z]+\])\s*\Z", disabled)
        if opened and text.startswith(disabled[: opened.start()]):
            return disabled + text[opened.start() :].lstrip("\n"), disabled
    raise SampleError(
        f"message {index} has no reasoning, but the generation prompt opens a block of it; give "
        f"`reasoning_content`, or a template with the variable enable_thinking"
    )


def _count_dropped(
    conversation: RenderedConversation, last: int, text: str, notes: Counter[str]
) -> None:
    """Count the texts of earlier answers that the template does not show any more."""
    for message in conversation.messages[:last]:
        if message["role"] != "assistant":
            continue
        for name in ("content", *REASONING_FIELDS):
            value = message.get(name)
            if isinstance(value, str) and value.strip() not in text:
                notes[f"earlier answers whose `{name}` the template drops or changes"] += 1
