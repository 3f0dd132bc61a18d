# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Recognise the format of a record, and make a conversation of it.

A field that the format does not use is metadata, or refuses the record: see
:mod:`~energon_ext.chats.fields`.
"""

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from energon_ext.chats.fields import TEXT_OF_PROMPTS, check_ignored, check_media
from energon_ext.chats.labels import labels_of_record
from energon_ext.chats.roles import SHAREGPT_CALL, SHAREGPT_ROLES
from energon_ext.chats.stored_json import (
    are_messages,
    has_null,
    read_json,
    read_lists,
    read_objects,
    remove_nulls,
    with_text_arguments,
)
from energon_ext.errors import SampleError

#: Formats by name, as the summary of `prepare` shows them.
OPENAI, SHAREGPT, ALPACA, PAIR = "OpenAI messages", "ShareGPT", "Alpaca", "prompt and response"

#: Fields of a message with its calls of tools.
_CALLS = ("tool_calls", "function_call")

#: Fields that any format may have, and that are used.
COMMON = ("tools", "chat_template_kwargs")


@dataclass(frozen=True)
class Conversation:
    """Messages in OpenAI's format, and what else their text depends on.

    Attributes:
        messages: ``{"role": ..., "content": ...}`` and further fields; checked by
            :func:`~energon_ext.chats.messages.check_messages` before they are rendered.
        tools: the functions that the model may call, as JSON schemas; None for none.
        template_kwargs: further arguments of the chat template, such as ``enable_thinking``.
        is_pair: True for a prompt and a response as text, between which nothing is inserted.
        is_whole: True for a pair whose prompt is what two texts have in common: the response begins
            with the first token that the prompt's own tokens do not have.
        notes: what `prepare` counts: the format, and fields that were ignored.
    """

    messages: list[Any]
    tools: list[Any] | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    is_pair: bool = False
    is_whole: bool = False
    notes: Counter[str] = field(default_factory=Counter)


def read_conversation(record: Any) -> Conversation:
    """Make a conversation of a record in one of the known formats.

    Raises:
        SampleError: the format is unknown, or a field of the text or its training is not
            understood. The message names the field and the remedy.

    Example:
        >>> read_conversation({"instruction": "Add.", "input": "2 + 2", "output": "4"}).messages
        [{'role': 'user', 'content': 'Add.\\n2 + 2'}, {'role': 'assistant', 'content': '4'}]
    """
    stored, texts = as_stored(record)
    record = remove_nulls(stored)
    name, read, used = _format_of(record)
    messages = read(record)
    tools = read_objects(record.get("tools"), "tools")
    arguments = read_json(record.get("chat_template_kwargs"), "chat_template_kwargs", dict)
    ignored = [each for each in record if each not in {*used, *COMMON}]
    labels = labels_of_record(record)
    for each in (each for each in ignored if each not in labels):
        check_ignored(each, record[each], name, messages)
    notes = Counter({f"format: {name}": 1})
    notes.update(f"messages given as JSON text: {each}" for each in texts if each in used)
    if _has_nulls_in_tools(stored):
        notes["records with null in tools or their arguments, left out (JSON text keeps it)"] = 1
    notes.update(f"ignored field: {each}" for each in ignored)
    is_pair = name == PAIR and all(isinstance(record[each], str) for each in used)
    if is_pair and (tools or arguments):
        raise SampleError("`tools` and `chat_template_kwargs` need `messages`, not a text `prompt`")
    return Conversation(messages, tools or None, arguments or {}, is_pair, notes=notes)


def read_prompt(record: Any) -> tuple[Conversation, dict[str, Any]]:
    """Make a prompt of a record: text under ``prompt``, or messages that end with a question.

    Returns:
        The prompt (``is_pair``: its only message is text), and the other fields, for the reward.

    Raises:
        SampleError: the record has no prompt, or a field that would not become part of its text.
    """
    stored, _ = as_stored(record)
    original, record = record, remove_nulls(stored)
    name = next(iter(_message_lists(record)), "prompt" if "prompt" in record else None)
    if name is None:
        raise SampleError(f"needs `prompt` or `messages`; it has {sorted(map(str, record))}")
    if isinstance(record[name], str) and name == "prompt":
        question = _message("user", record[name])
        found = Conversation([question], is_pair=True)
        used = [name]
        for each in COMMON:
            if record.get(each):
                raise SampleError(f"`{each}`: for messages only, not for a text `prompt`")
    else:
        of_prompt = "conversations" if is_sharegpt(record[name]) else "messages"
        kind = of_prompt if name == "prompt" else name
        as_messages = {kind: record[name]}
        _, read, used_names = _format_of(as_messages)
        found = Conversation(
            read({**record, **as_messages}),
            read_objects(record.get("tools"), "tools") or None,
            read_json(record.get("chat_template_kwargs"), "chat_template_kwargs", dict) or {},
        )
        used = [name, *COMMON, *(each for each in used_names if each == "system")]
    metadata = {key: original[key] for key in original if key not in used and key[:2] != "__"}
    for each, value in metadata.items():
        check_media(each, value, f"`{each}` next to the prompt")
        if each in TEXT_OF_PROMPTS and value is not None:
            check_ignored(each, value, "the prompt", found.messages)
    return found, metadata


def as_stored(record: Any) -> tuple[dict[str, Any], list[str]]:
    """Return a record with its messages as lists, and the fields in which they were JSON text.

    Energon's own fields are left out.
    """
    if not isinstance(record, Mapping):
        found = type(record).__name__
        hint = "; put the list under `messages`" if isinstance(record, list) else ""
        raise SampleError(f"the record is a {found}, a JSON object is needed{hint}")
    return read_lists({k: v for k, v in record.items() if not str(k).startswith("__")})


def _has_nulls_in_tools(record: Mapping[str, Any]) -> bool:
    if has_null(record.get("tools")):
        return True
    names = ("messages", "conversations", "conversation", "completion", "response")
    lists = (record.get(name) for name in names)
    messages = [m for each in lists if isinstance(each, (list, tuple)) for m in each]
    calls = (m.get(n) for m in messages if isinstance(m, Mapping) for n in _CALLS)
    return any(map(has_null, calls))


# Formats ----------------------------------------------------------------------------------------


def _format_of(
    record: Mapping[str, Any],
) -> tuple[str, Callable[[Mapping[str, Any]], list[Any]], tuple[str, ...]]:
    """Return the name of a format, its reader, and the fields that it uses."""
    lists = _message_lists(record)
    if len(lists) == 2:
        raise SampleError("`messages` and `conversations` are both given; remove one of them")
    if lists:
        has_speakers = is_sharegpt(record[lists[0]])
        if has_speakers and lists[0] == "messages":
            raise SampleError("`messages` have `from` and `value`; name the list `conversations`")
        if has_speakers:
            return SHAREGPT, lambda record: _read_sharegpt(record, lists[0]), (lists[0], "system")
        return OPENAI, lambda record: _as_list(record[lists[0]], lists[0]), (lists[0],)
    if "chosen" in record or "rejected" in record:
        raise SampleError(
            "`chosen` and `rejected` are a preference pair, which has no single answer to train "
            "on; for fine-tuning, put the chosen conversation under `messages`"
        )
    for answer in ("completion", "response"):
        if "prompt" in record and answer in record:
            return PAIR, functools.partial(_read_pair, answer=answer), ("prompt", answer)
    for context, reply in (("input", "output"), ("context", "response")):  # Alpaca, Dolly
        if "instruction" in record and reply in record:
            read = functools.partial(_read_alpaca, context=context, reply=reply)
            return ALPACA, read, ("instruction", context, reply, "system", "history")
    raise SampleError(
        f"needs `messages`, `conversations`, `prompt` and `response`, or `instruction` and "
        f"`output`; it has {sorted(map(str, record))}"
    )


def _message_lists(record: Mapping[str, Any]) -> list[str]:
    """Return the fields with the messages of a record.

    WildChat and LMSYS-Chat name theirs ``conversation``, which elsewhere is a label, such as an id.
    """
    names = [name for name in ("messages", "conversations") if name in record]
    found = record.get("conversation")
    is_other = bool(names) or "prompt" in record or "instruction" in record
    is_list = isinstance(found, (list, tuple)) and are_messages(found)
    return ["conversation"] if is_list and not is_other else names


def is_sharegpt(messages: Any) -> bool:
    """Return True for a list of messages in ShareGPT's form, by its first one."""
    first = next(iter(messages), None) if isinstance(messages, (list, tuple)) else None
    return isinstance(first, Mapping) and "role" not in first and "from" in first


def _read_sharegpt(record: Mapping[str, Any], name: str) -> list[Any]:
    messages = [each for each in _system(record) if not _begins_with(record[name], each)]
    for index, message in enumerate(record[name]):
        where = f"message {index}"
        if not isinstance(message, Mapping) or not isinstance(message.get("from"), str):
            raise SampleError(f"{where} must have `from` and `value` as text")
        speaker, value = message["from"], message.get("value")
        rest = {k: v for k, v in message.items() if k not in ("from", "value")}
        if speaker == SHAREGPT_CALL:
            calls = read_json(value, f"{where}: the tool call", (dict, list))
            calls = [
                with_text_arguments(call)
                for call in (calls if isinstance(calls, list) else [calls])
            ]
            messages.append({"role": "assistant", "tool_calls": calls, **rest})
        elif speaker in SHAREGPT_ROLES:
            messages.append({"role": SHAREGPT_ROLES[speaker], "content": value, **rest})
        else:
            allowed = ", ".join([*SHAREGPT_ROLES, SHAREGPT_CALL])
            raise SampleError(f"{where} is from {speaker!r:.80}; {allowed} are allowed")
    return messages


def _read_alpaca(record: Mapping[str, Any], context: str, reply: str) -> list[Any]:
    turns = record.get("history") or []
    is_list = isinstance(turns, (list, tuple))
    if not is_list or not all(isinstance(t, (list, tuple)) and len(t) == 2 for t in turns):
        raise SampleError("`history` must be a list of pairs, [question, answer]")
    messages = _system(record)
    for question, answer in turns:
        messages += [_message("user", question), _message("assistant", answer)]
    parts = [record["instruction"], record.get(context) or ""]
    if not all(isinstance(part, str) for part in parts):
        raise SampleError(f"`instruction` and `{context}` must be text")
    question = "\n".join(part for part in parts if part)
    return [*messages, _message("user", question), _message("assistant", record[reply])]


def _read_pair(record: Mapping[str, Any], answer: str) -> list[Any]:
    prompt, response = record["prompt"], record[answer]
    if isinstance(prompt, str) and isinstance(response, str):
        return [_message("user", prompt), _message("assistant", response)]
    if isinstance(prompt, str):
        raise SampleError(f"`prompt` is text, so `{answer}` must be text as well")
    # Only what follows the prompt is trained.
    asked = [
        {**message, "weight": 0} if _role(message) == "assistant" else message
        for message in _as_list(prompt, "prompt")
    ]
    if isinstance(response, str):
        return [*asked, _message("assistant", response)]
    answers = _as_list(response, answer)
    if prompt and answers[: len(prompt)] == list(prompt):
        raise SampleError(
            f"`{answer}` begins with the messages of `prompt`, which would be written twice; "
            f"remove them from one"
        )
    return [*asked, *answers]


def _system(record: Mapping[str, Any]) -> list[Any]:
    return [_message("system", record["system"])] if record.get("system") else []


def _begins_with(messages: Sequence[Any], system: Mapping[str, Any]) -> bool:
    """Return True if messages in ShareGPT's form begin with a system message."""
    first = messages[0]
    if not isinstance(first, Mapping):
        return False
    return first.get("from") == "system" and first.get("value") == system["content"]


def _message(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def _role(message: Any) -> Any:
    return message.get("role") if isinstance(message, Mapping) else None


def _as_list(messages: Any, name: str) -> list[Any]:
    if not isinstance(messages, (list, tuple)):
        text = "text or " if name not in ("messages", "conversations") else ""
        raise SampleError(f"`{name}` must be {text}a list of messages, or that list as JSON text")
    return list(messages)
