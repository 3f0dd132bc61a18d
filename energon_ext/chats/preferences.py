# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Two answers to one prompt: from a record to two conversations.

The prompt with each answer becomes the record of a conversation, which
:mod:`~energon_ext.chats.records` reads as for fine-tuning. Only what follows the prompt is trained.
"""

import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from energon_ext.chats.fields import check_media, has_other_text
from energon_ext.chats.labels import GENERAL, labels_of_record
from energon_ext.chats.reasoning import REASONING_FIELDS
from energon_ext.chats.records import (
    COMMON,
    Conversation,
    as_stored,
    is_sharegpt,
    read_conversation,
)
from energon_ext.chats.roles import SHAREGPT_CALL, SHAREGPT_ROLES
from energon_ext.chats.stored_json import remove_nulls
from energon_ext.errors import SampleError

SIDES = ("chosen", "rejected")

#: Fields that may have the prompt, as messages or as text.
_LISTS, _TEXTS = ("prompt", "messages", "conversations"), ("prompt", "instruction")

#: Fields of an answer in records with one answer.
_OTHER_ANSWERS = ("response", "completion", "output")

#: Fields of a message, at least one of which is filled in an answer.
_CONTENTS = ("content", "tool_calls", "function_call", *REASONING_FIELDS)

#: The first word or other characters of a text.
_FIRST_WORD = re.compile(r"\s*(?:\w+|[^\w\s]+)")


def read_preference(record: Any) -> tuple[Conversation, Conversation]:
    """Make the chosen and the rejected conversation of a record.

    ``chosen`` and ``rejected`` are texts, or messages that follow the prompt. The prompt is text or
    messages under ``prompt``, messages under ``messages`` or ``conversations``, or an Alpaca
    ``instruction``. Or both are whole conversations or texts, which begin with the prompt: the
    messages that they have in common, or the words. Answers within the prompt are not trained.

    Raises:
        SampleError: an answer is missing or empty, both are equal, or the prompt is unclear.

    Example:
        >>> record = {"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5"}
        >>> [found.messages[-1]["content"] for found in read_preference(record)]
        [' 4', ' 5']
        >>> question = {"role": "user", "content": "Hi"}
        >>> answers = [{"role": "assistant", "content": text} for text in ("Hello!", "Go away.")]
        >>> chosen, _ = read_preference(
        ...     {"chosen": [question, answers[0]], "rejected": [question, answers[1]]})
        >>> chosen.messages == [question, answers[0]]
        True
    """
    stored, texts = as_stored(record)
    fields = {name: value for name, value in stored.items() if value is not None}
    remove_nulls(fields)  # refuses a record with too many levels
    answers: list[Any] = [_answer(fields, side) for side in SIDES]
    if fields.get("label") in (0, 1):
        raise SampleError(
            "`label` next to `chosen` and `rejected` may also say which one is better; remove it"
        )
    if isinstance(answers[0], str) != isinstance(answers[1], str):
        raise SampleError("one of `chosen` and `rejected` is text; both or none must be")
    if remove_nulls(answers[0]) == remove_nulls(answers[1]):
        raise SampleError("`chosen` and `rejected` are equal, so neither is preferred")
    others = {name: value for name, value in fields.items() if name not in SIDES}
    is_whole = isinstance(answers[0], str) and not {*others} & {*_LISTS, *_TEXTS}
    if isinstance(answers[0], str):
        others, answers = _separate_text(others, answers, is_whole)
    else:
        others, answers = _separate_messages(others, answers)
    name = _name_of_prompt(others)
    found = [_read(others, name, answer, side) for answer, side in zip(answers, SIDES)]
    for conversation in found:
        conversation.notes.update(f"messages given as JSON text: {each}" for each in texts)
    chosen, rejected = (dataclasses.replace(each, is_whole=is_whole) for each in found)
    return chosen, rejected


def _answer(record: Mapping[str, Any], side: str) -> Any:
    """Return an answer as text or as a list of messages."""
    answer = record.get(side)
    if answer is None:
        raise SampleError(f"needs `chosen` and `rejected`; it has {sorted(map(str, record))}")
    if isinstance(answer, Mapping):
        return [answer]
    if not isinstance(answer, (str, list, tuple)):
        raise SampleError(f"`{side}` must be text, a message or a list of messages")
    return answer if isinstance(answer, str) else list(answer)


def _separate_messages(
    others: Mapping[str, Any], answers: list[list[Any]]
) -> tuple[dict[str, Any], list[Any]]:
    """Return the fields with the prompt as messages, and only the messages of the answers."""
    # `messages` may repeat the chosen conversation, for fine-tuning.
    chosen = remove_nulls(answers[0])
    others = {
        k: v for k, v in others.items() if not (k in _LISTS and remove_nulls(v) in (chosen, []))
    }
    name = next((each for each in _LISTS if isinstance(others.get(each), list)), None)
    if name is not None:
        given = others[name]
        is_repeated = all(_common(given, answer) == len(given) for answer in answers)
        answers = [answer[len(given) if is_repeated else 0 :] for answer in answers]
        for answer, side in zip(answers, SIDES):
            if not _is_answer(next(iter(answer), None)):
                raise SampleError(
                    f"`{side}` has no answer as its first message after `{name}`; if it is a whole "
                    f"conversation, remove `{name}`"
                )
        return others, answers
    common = _common(*answers)
    if not common:
        if any(isinstance(others.get(name), str) for name in _TEXTS):
            raise SampleError("the prompt is text, so `chosen` and `rejected` must be text as well")
        raise SampleError(
            "`chosen` and `rejected` have no messages in common; give the prompt as `prompt`"
        )
    for answer, side in zip(answers, SIDES):
        if not _is_answer(answer[common] if len(answer) > common else None):
            raise SampleError(
                f"`{side}` has no answer as message {common}, the first that is not in both"
            )
    return {**others, "messages": answers[0][:common]}, [answer[common:] for answer in answers]


def _separate_text(
    others: dict[str, Any], answers: list[str], is_whole: bool
) -> tuple[dict[str, Any], list[Any]]:
    """Return the fields with the prompt, and the texts of the answers without it.

    As TRL does, the text that both have in common is the prompt, less a space at its end.
    """
    texts = {name: others[name] for name in _TEXTS if isinstance(others.get(name), str)}
    common_text = os.path.commonprefix(answers)
    for name, prompt in texts.items():
        is_first = bool(prompt.strip()) and common_text.startswith(prompt)
        if is_first or (_has_words(prompt) and prompt.strip() in common_text):
            begin = "" if is_first else "text that contains "
            raise SampleError(
                f"`chosen` and `rejected` both begin with {begin}`{name}`; remove `{name}`, and "
                f"the words with which both begin are the prompt"
            )
    if not is_whole:
        return others, answers
    # Each answer has at least a character.
    border = max(0, min(len(common_text), *(len(answer) - 1 for answer in answers)))
    prompt = answers[0][:border].removesuffix(" ")
    if not prompt.strip() or not all(_has_first_word(prompt, answer) for answer in answers):
        raise SampleError(
            "`chosen` and `rejected` do not begin with the same words; give the prompt as `prompt`"
        )
    _check_others(others, prompt)
    return {**others, "prompt": prompt}, [answer[len(prompt) :] for answer in answers]


def _has_first_word(prompt: str, answer: str) -> bool:
    """Return True if a prompt has the whole first word of the text that it begins."""
    found = _FIRST_WORD.match(answer)
    return found is not None and found.end() <= len(prompt)


def _check_others(others: Mapping[str, Any], prompt: str) -> None:
    """Raise SampleError for text next to whole texts that may be their prompt."""
    labels = labels_of_record(others)
    for name, value in others.items():
        check_media(name, value, f"`{name}` next to `chosen` and `rejected`")
        is_word = name in GENERAL.record and isinstance(value, str) and not _has_words(value)
        if name not in {*COMMON, *labels} and not is_word and has_other_text(value, prompt):
            raise SampleError(
                f"`{name}` is text that is not in the words with which `chosen` and `rejected` "
                f"begin; name it `prompt` if they answer it, or remove it"
            )


def _has_words(text: str) -> bool:
    """Return True if a text has several words."""
    return len(text.split()) > 1


def _name_of_prompt(others: Mapping[str, Any]) -> str:
    """Return the name of the field with the prompt."""
    # A text beside messages is a field like others: the messages must contain it.
    found = [name for name in _LISTS if isinstance(others.get(name), (list, tuple))]
    found = found or [name for name in _TEXTS if isinstance(others.get(name), str)]
    if not found:
        has = sorted([*map(str, others), *SIDES])
        raise SampleError(f"needs a `prompt`, as text or messages; it has {has}")
    if len(found) > 1:
        raise SampleError(f"`{found[0]}` and `{found[1]}` are both given; remove one of them")
    for name in _OTHER_ANSWERS:
        if name in others:
            raise SampleError(f"`{name}` beside `chosen` and `rejected` is not used; remove it")
    return found[0]


def _read(others: Mapping[str, Any], name: str, answer: str | list[Any], side: str) -> Conversation:
    """Return the conversation of the prompt under a name and an answer."""
    prompt, record = others[name], dict(others)
    if isinstance(prompt, str):
        record["output" if name == "instruction" else "response"] = answer
    else:
        del record[name]
        has_speakers = is_sharegpt(prompt)
        if isinstance(answer, str):
            speaker, content = ("from", "value") if has_speakers else ("role", "content")
            answer = [{speaker: "gpt" if has_speakers else "assistant", content: answer}]
        asked = [{**each, "weight": 0} if _is_answer(each) else each for each in prompt]
        record["conversations" if has_speakers else "messages"] = [*asked, *answer]
    try:
        conversation = read_conversation(record)
    except SampleError as error:
        raise SampleError(f"`{side}`: {error}") from error
    if any(map(_is_empty, conversation.messages)):
        raise SampleError(f"`{side}` has an empty answer")
    return conversation


def _common(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Return how many messages two lists begin with in common."""
    pairs = zip(remove_nulls(first), remove_nulls(second))
    return next(
        (number for number, (one, other) in enumerate(pairs) if one != other),
        min(len(first), len(second)),
    )


def _is_answer(message: Any) -> bool:
    """Return True for a message of the assistant, also in ShareGPT's form."""
    if not isinstance(message, Mapping):
        return False
    speaker = str(message.get("from"))
    names = (message.get("role"), SHAREGPT_ROLES.get(speaker))
    return "assistant" in names or speaker == SHAREGPT_CALL


def _is_empty(message: Any) -> bool:
    """Return True for a trained answer without text, calls and reasoning."""
    if not _is_answer(message) or message.get("weight") == 0:
        return False
    said = [message.get(name) for name in _CONTENTS]
    return not any(each.strip() if isinstance(each, str) else each for each in said)
