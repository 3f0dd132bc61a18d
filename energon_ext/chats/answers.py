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

A prompt asks for reasoning if the answer has some, and otherwise not. Where it opens a block of
reasoning that the template does not fill, :mod:`~energon_ext.chats.reasoning` joins the prompt and
the answer.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from energon_ext.chats.reasoning import (
    REASONING_FIELDS,
    block_at_end,
    continue_block,
    is_said,
    lacks_opening,
)
from energon_ext.chats.rendered import RenderedConversation
from energon_ext.chats.switches import remove_commands
from energon_ext.chats.templates import MARK
from energon_ext.chats.tokenization import AnsweredText, Span
from energon_ext.errors import SampleError

#: All answers of a conversation in one text, only its last one, or one text per answer.
ALL, LAST, EACH = "all", "last", "each"
ANSWERS = (ALL, LAST, EACH)

#: Note on answers that are allowed, but perhaps not meant.
EMPTY = "answers without content, of which only the end is trained"


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
    _count_doubtful(conversation, answers[-1:] if choice == LAST else answers, notes)
    if choice == LAST:
        _count_left_out(conversation, notes)
        return [text_of_answer(conversation, answers[-1], notes)]
    if choice != EACH:
        counts: Counter[str] = Counter()
        fitted = _fit_all(conversation, counts)
        found = None if fitted is None else _one_text(fitted, counts)
        if found is not None:
            notes.update(counts)
            return [found]
        if choice == ALL:
            raise SampleError(
                "the chat template rewrites earlier text, so the answers are not in one text; "
                "use answers='each' (--answers each), one sample per answer"
            )
        if len(answers) > 1:
            notes["conversations with one sample per answer, since the template rewrites"] += 1
    _count_left_out(conversation, notes)
    return [text_of_answer(conversation, index, notes) for index in answers]


def _count_doubtful(
    conversation: RenderedConversation, answers: Sequence[int], notes: Counter[str]
) -> None:
    """Count answers of which somebody may doubt that they are meant as they are read."""
    for index in answers:
        message, block = conversation.messages[index], conversation.block(index)
        if block is not None and lacks_opening(message.get("content"), block):
            notes[f"contents taken as reasoning up to {block.closing}, without a beginning"] += 1
        if not any(message.get(name) for name in ("content", "tool_calls", *REASONING_FIELDS)):
            notes[EMPTY] += 1


def _fit_all(
    conversation: RenderedConversation, notes: Counter[str]
) -> RenderedConversation | None:
    """Return the conversation with prompts that fit all answers; None if they need different ones.

    Raises:
        SampleError: no prompt fits one of the answers.
    """
    for index in conversation.answers:
        found: Counter[str] = Counter()
        fitted = conversation.fit_prompt(index, found)
        if all(fitted.is_fit(other) for other in conversation.answers):
            notes.update(dict.fromkeys(found, len(conversation.answers)))
            return fitted
    return None


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
        begin, weight = conversation.begin_of(index, text, prompt), conversation.weights[index]
        answered = text if index == last else conversation.until(index)[0]
        is_kept = len(answered) >= begin and text.startswith(answered)
        end = len(answered) if is_kept else _next_answer(conversation, index, text)
        if end is None or not _is_continued(conversation, index, prompt, text[:end]):
            return None
        places = _tags_within(tags, begin, end, notes) or [(begin, end)] * is_kept
        # What is trained, and not what the answer would be as the last.
        trained = "".join(text[slice(*each)] for each in places)
        if not places or _find_unsaid(conversation, index, trained):
            return None
        spans += [Span(*place, weight) for place in places]
    _count_dropped(conversation, last, text, notes)
    return AnsweredText(text, spans)


def _is_continued(conversation: RenderedConversation, index: int, prompt: str, text: str) -> bool:
    """Return True if a text is its prompt with an answer, as it would be trained alone."""
    try:
        return _continue_prompt(conversation, index, prompt, text) == text
    except SampleError:  # what follows the answer may be the next prompt's
        return False


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
    conversation = conversation.fit_prompt(index, notes)
    prompt, weight = conversation.prompt(index), conversation.weights[index]
    rendered, tags = conversation.until(index)
    text = _continue_prompt(conversation, index, prompt, rendered)
    if text is None:
        raise SampleError(
            f"message {index}: the chat template does not continue its own generation prompt with "
            f"the answer; put it and an answer before it into one message, use another template, "
            f"or one with generation tags"
        )
    tags = tags if text == rendered else []
    begin = conversation.begin_of(index, text, prompt)
    places = _tags_within(tags, begin, len(text), notes) or [(begin, len(text))]
    trained = "".join(text[slice(*place)] for place in places)
    if name := _find_unsaid(conversation, index, trained):
        raise SampleError(
            f"message {index}: the chat template writes only a part of `{name}`; does it split it "
            f"at the end of a block of reasoning? Put reasoning under `reasoning_content`, or use "
            f"another template"
        )
    _count_dropped(conversation, index, text, notes)
    return AnsweredText(text, [Span(*place, weight) for place in places])


def _tags_within(
    tags: Sequence[tuple[int, int]], begin: int, end: int, notes: Counter[str]
) -> list[tuple[int, int]]:
    """Return the generation tags of an answer if they begin where its prompt ends."""
    inside = [tag for tag in tags if begin <= tag[0] and tag[1] <= end]
    if not tags or (inside and inside[0][0] == begin):
        return inside
    notes["answers whose generation tag does not begin where the prompt ends"] += 1
    return []


def _continue_prompt(
    conversation: RenderedConversation, index: int, prompt: str, text: str
) -> str | None:
    """Return a prompt with what the template writes after it for an answer; None if unclear.

    The text does not begin with the prompt if that opens a block of reasoning which the template
    does not repeat, or if the template shows earlier messages in another form once the answer
    follows (gpt-oss: the reasoning of earlier calls in the same turn).
    """
    own_tags, message = conversation.template.own_tags, conversation.messages[index]
    block = block_at_end(prompt, own_tags)
    if text.startswith(prompt):
        return (
            text if block is None else continue_block(prompt, block, text[len(prompt) :], message)
        )
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
    if block is None:
        return prompt + text[head:]
    return continue_block(prompt, block, text[head:].lstrip("\n"), message)


def _find_unsaid(conversation: RenderedConversation, index: int, answer: str) -> str | None:
    """Return the name of a field of which the text of a trained answer lacks a part.

    Templates that split a content at the end of a block of reasoning may drop what precedes it.
    """
    for name in ("content", *REASONING_FIELDS):
        value = conversation.messages[index].get(name)
        own_tags = conversation.template.own_tags
        if isinstance(value, str) and not is_said(value, answer, own_tags):
            return name
    return None


def _count_dropped(
    conversation: RenderedConversation, last: int, text: str, notes: Counter[str]
) -> None:
    """Count the texts of earlier messages that the template does not show any more."""
    for message in conversation.messages[:last]:
        names = ("content", *REASONING_FIELDS) if message["role"] == "assistant" else ("content",)
        missing = [name for name in names if not _is_shown(message, name, text)]
        if not all(is_said(name, text) for name in _names_of_calls(message)):
            missing.append("tool_calls")
        for name in missing:
            if message["role"] in ("system", "developer"):
                raise SampleError(
                    f"the chat template does not write a message of role {message['role']} in its "
                    f"place; move it to the beginning, or use a template that writes it"
                )
            notes[f"earlier `{name}` of role {message['role']}, dropped or changed"] += 1


def _is_shown(message: Mapping[str, Any], name: str, text: str) -> bool:
    value = message.get(name)
    if not isinstance(value, str) or is_said(value, text):
        return True
    # A template that obeys a command need not write it.
    return message["role"] == "system" and is_said(remove_commands(value), text)


def _names_of_calls(message: Mapping[str, Any]) -> list[Any]:
    return [call.get("function", call)["name"] for call in message.get("tool_calls", ())]
