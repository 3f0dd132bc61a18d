# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Check the messages of a conversation, and bring them to the form that templates expect."""

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from energon_ext.chats.fields import check_media, says_what_is_trained
from energon_ext.chats.labels import GENERAL, labels_of_message
from energon_ext.chats.reasoning import without_repeated
from energon_ext.chats.roles import ROLES
from energon_ext.chats.stored_json import (
    are_parts,
    parse_json,
    read_json,
    read_objects,
    remove_nulls,
)
from energon_ext.errors import SampleError

#: Fields of a message that name or order it. Templates may write them, but need not.
LABELS = ("role", *GENERAL.message)

#: Type of a part of a content that is reasoning, and the field with its text.
THINKING = "thinking"


@dataclass(frozen=True)
class Messages:
    """Checked messages.

    Attributes:
        rendered: what the chat template gets; arguments of tool calls are objects.
        weights: of the tokens of each message; only those of assistant messages are used.
        original_calls: the tool calls with their arguments as text, by message; some templates
            need them.
        parts: by message, the (type, text) of each part of a content with reasoning in it;
            :mod:`~energon_ext.chats.thinking_parts` makes them the content.
        notes: counts of what was left out.
    """

    rendered: list[dict[str, Any]]
    weights: list[float]
    original_calls: dict[int, list[Any]] = field(default_factory=dict)
    parts: dict[int, list[tuple[str, str]]] = field(default_factory=dict)
    notes: Counter[str] = field(default_factory=Counter)


def check_messages(messages: Any) -> Messages:
    """Check messages and normalise their contents, tool calls and weights.

    Raises:
        SampleError: a message is not understood; it is named by its number.
    """
    if not isinstance(messages, (list, tuple)) or not messages:
        raise SampleError("`messages` must be a list of messages")
    checked = Messages([], [])
    for index, message in enumerate(messages):
        _check_message(index, message, checked)
    return checked


def check_answers(messages: Messages) -> None:
    """Raise SampleError unless there is an answer to train on, and a question before each."""
    roles = [message["role"] for message in messages.rendered]
    if "assistant" not in roles:
        raise SampleError("no assistant message, so there is nothing to train on")
    trained = [
        index
        for index, role in enumerate(roles)
        if role == "assistant" and messages.weights[index] > 0
    ]
    if not trained:
        raise SampleError("all answers have weight 0, so there is nothing to train on")
    asked = next((i for i, role in enumerate(roles) if role in ("user", "tool", "function")), None)
    if asked is None or trained[0] < asked:
        hint = ", or make its system message one of role user" if "system" in roles else ""
        raise SampleError(
            f"message {trained[0]} answers no question; give it `weight` 0, or remove it{hint}"
        )


def check_question(messages: Messages) -> None:
    """Raise SampleError if the messages of a prompt end with an answer."""
    if messages.rendered[-1]["role"] == "assistant":
        raise SampleError(
            "the last message is an answer, which would become part of the prompt; end with a "
            "question"
        )


def _check_message(index: int, message: Any, checked: Messages) -> None:
    where = f"message {index}"
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise SampleError(f"{where} must be an object with `role` and `content`")
    message = remove_nulls(message)
    role = message["role"]
    if role not in ROLES:
        raise SampleError(f"{where} has role {role!r:.80}; {', '.join(ROLES)} are allowed")
    for name in sorted(labels_of_message(message)):
        checked.notes[f"ignored field: messages.{name}"] += 1
        del message[name]
    for name, value in message.items():
        if name != "weight" and says_what_is_trained(name):
            raise SampleError(f"{where}: `{name}` is not understood; give `weight` from 0 to 1")
        check_media(name, value, f"{where}: `{name}`")
    weight = message.pop("weight", 1.0 if role == "assistant" else 0.0)
    is_number = isinstance(weight, (int, float)) and not isinstance(weight, bool)
    if not is_number or not math.isfinite(weight) or not 0 <= weight <= 1:
        raise SampleError(f"{where}: `weight` is {weight!r:.40}, a number from 0 to 1 is needed")
    if role != "assistant" and weight:
        raise SampleError(f"{where}: `weight` {weight} on role {role}; only answers are trained")
    if message.get("function_call") and not message.get("tool_calls"):
        call = read_json(message.pop("function_call"), f"{where}: `function_call`", dict)
        message["tool_calls"] = [{"type": "function", "function": call}]
        checked.notes["`function_call` of answers, read as `tool_calls`"] += 1
    if "tool_calls" in message:
        if role != "assistant" and message["tool_calls"]:
            raise SampleError(f"{where}: `tool_calls` of role {role}; only answers call tools")
        calls = read_objects(message.pop("tool_calls"), f"{where}: `tool_calls`")
        if calls:
            parsed, texts = _tool_calls(where, calls)
            message["tool_calls"] = parsed
            checked.original_calls[index] = texts
    parts = _parts(where, message, checked.notes)
    if parts is not None:
        message["content"] = "".join(text for _, text in parts)
        if any(kind == THINKING for kind, _ in parts):
            checked.parts[index] = parts
    if (rest := without_repeated(message)) is not None:
        message["content"] = rest
        checked.notes["reasoning that the content of an answer repeats, written once"] += 1
    for name, value in message.items():
        if name not in LABELS and isinstance(value, (bool, int, float)):
            checked.notes[f"ignored field: messages.{name}"] += 1
    checked.rendered.append(message)
    checked.weights.append(float(weight))


def _parts(
    where: str, message: Mapping[str, Any], notes: Counter[str]
) -> list[tuple[str, str]] | None:
    """Return the (type, text) of each part of a content; None if there is none next to calls."""
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        return None
    if isinstance(content, str):
        if message["role"] in ("system", "user", "assistant") and are_parts(content):
            notes["contents that are parts as JSON text, kept as that text"] += 1
        return [("text", content)]
    if not isinstance(content, list):
        found = "no" if content is None else f"a {type(content).__name__} as"
        raise SampleError(f'{where} has {found} `content`; text is needed, "" for none')
    return [_part(where, part, notes) for part in content]


def _part(where: str, part: Any, notes: Counter[str]) -> tuple[str, str]:
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    text = part.get(kind) if kind in ("text", THINKING) else None
    if kind == THINKING and isinstance(text, list):  # of parts, as Mistral stores it
        text = "".join(_part(where, each, notes)[1] for each in text)
    if not isinstance(text, str):
        raise SampleError(
            f"{where}: `content` has a part of type {kind!r:.40}; only parts of type 'text' and "
            f"'{THINKING}' are allowed; images and audio need your own TaskEncoder"
        )
    for name, value in part.items():
        if name in ("type", kind) or value in ("", [], {}):
            continue
        field = f"{where}: `{name}` of a part"
        check_media(name, value, field)
        if says_what_is_trained(name) or (_is_text(value) and name not in GENERAL.part):
            raise SampleError(f"{field} is not understood; remove it")
        notes[f"ignored field: messages.content.{name}"] += 1
    return str(kind), text


def _tool_calls(where: str, calls: Any) -> tuple[list[Any], list[Any]]:
    """Return tool calls with their arguments as objects, and with their arguments as text."""
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise SampleError(f"{where}: `tool_calls` must be a list of objects")
    parsed: list[Any] = []
    texts: list[Any] = []
    for number, call in enumerate(calls):
        place = f"{where}: tool call {number}"
        function = call.get("function", call)
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise SampleError(f"{place} needs a function with a `name`")
        arguments, text = _arguments(place, function.get("arguments"))
        _check_fields_of_call(place, call, function)
        for found, value in ((parsed, arguments), (texts, text)):
            filled = {**function, "arguments": value}
            found.append({**call, "function": filled} if "function" in call else filled)
    return parsed, texts


def _check_fields_of_call(place: str, *objects: Mapping[str, Any]) -> None:
    """Raise SampleError for text in a call that no template would write."""
    for name, value in ((k, v) for each in objects for k, v in each.items()):
        if name not in ("function", "name", "arguments", *LABELS) and _is_text(value):
            raise SampleError(f"{place}: `{name}` is not understood; remove it")


def _is_text(value: Any) -> bool:
    return bool(value) and isinstance(value, (str, list, dict))


def _arguments(place: str, arguments: Any) -> tuple[dict[str, Any], str]:
    text = arguments
    if isinstance(arguments, str):
        try:
            arguments = parse_json(arguments, f"{place}:") if arguments.strip() else {}
        except SampleError:
            raise
        except ValueError:
            arguments = None
        text = text if text.strip() else "{}"
    elif arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise SampleError(f"{place}: `arguments` are not a JSON object, as text or as it is")
    return arguments, text if isinstance(text, str) else json.dumps(arguments, ensure_ascii=False)
