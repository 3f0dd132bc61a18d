# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Check the messages of a conversation, and bring them to the form that templates expect."""

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from energon_ext.chats.fields import says_what_is_trained
from energon_ext.errors import SampleError

ROLES = ("system", "developer", "user", "assistant", "tool", "function")

#: Fields of a message that name or order it. Templates may write them, but need not.
LABELS = (
    *("role", "id", "name", "tool_call_id", "index", "created", "type"),
    *("created_at", "timestamp", "model", "source", "language", "uuid"),
)


@dataclass(frozen=True)
class Messages:
    """Checked messages.

    Attributes:
        rendered: what the chat template gets; arguments of tool calls are objects.
        weights: of the tokens of each message; only those of assistant messages are used.
        original_calls: the tool calls with their arguments as text, by message; some templates
            need them.
        notes: counts of what was left out.
    """

    rendered: list[dict[str, Any]]
    weights: list[float]
    original_calls: dict[int, list[Any]] = field(default_factory=dict)
    notes: Counter[str] = field(default_factory=Counter)


#: Most levels of a record within each other.
_MOST_LEVELS = 100


def remove_nulls(value: Any, levels: int = _MOST_LEVELS) -> Any:
    """Remove the keys whose value is null, at any depth.

    Arrow stores a key that one row has in all rows (Parquet, ``datasets``), as null. Nulls in lists
    and in arguments given as JSON text stay.

    Example:
        >>> remove_nulls({"city": "Lisbon", "names": None, "list": [None, {"a": None}]})
        {'city': 'Lisbon', 'list': [None, {}]}
    """
    if isinstance(value, str) or not isinstance(value, (Mapping, list, tuple)):
        return value
    if not levels:
        raise SampleError(f"has more than {_MOST_LEVELS} lists and objects within each other")
    if isinstance(value, Mapping):
        return {
            key: each if isinstance(each, str) else remove_nulls(each, levels - 1)
            for key, each in value.items()
            if each is not None
        }
    return [remove_nulls(each, levels - 1) for each in value]


def has_null(value: Any) -> bool:
    """Return True if :func:`remove_nulls` removes something."""
    if isinstance(value, Mapping):
        return any(each is None or has_null(each) for each in value.values())
    return isinstance(value, (list, tuple)) and any(has_null(each) for each in value)


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
        raise SampleError(
            f"message {trained[0]} answers no question; give it `weight` 0, or remove it"
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
    for name in message:
        if name != "weight" and says_what_is_trained(name):
            raise SampleError(f"{where}: `{name}` is not understood; give `weight` from 0 to 1")
    weight = message.pop("weight", 1.0 if role == "assistant" else 0.0)
    is_number = isinstance(weight, (int, float)) and not isinstance(weight, bool)
    if not is_number or not math.isfinite(weight) or not 0 <= weight <= 1:
        raise SampleError(f"{where}: `weight` is {weight!r:.40}, a number from 0 to 1 is needed")
    if role != "assistant" and weight:
        raise SampleError(f"{where}: `weight` {weight} on role {role}; only answers are trained")
    if "tool_calls" in message:
        if role != "assistant" and message["tool_calls"]:
            raise SampleError(f"{where}: `tool_calls` of role {role}; only answers call tools")
        calls = message.pop("tool_calls")
        if calls:
            parsed, texts = _tool_calls(where, calls)
            message["tool_calls"] = parsed
            checked.original_calls[index] = texts
    content = _content(where, message, role)
    if content is not None:
        message["content"] = content
    for name, value in message.items():
        if name not in LABELS and isinstance(value, (bool, int, float)):
            checked.notes[f"ignored field: messages.{name}"] += 1
    checked.rendered.append(message)
    checked.weights.append(float(weight))


def _content(where: str, message: Mapping[str, Any], role: str) -> str | None:
    """Return the text of a message; None if it has none beside its tool calls."""
    content = message.get("content")
    if content is None and (message.get("tool_calls") or message.get("function_call")):
        return None
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        found = "no" if content is None else f"a {type(content).__name__} as"
        raise SampleError(f"{where} has {found} `content`; text is needed")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise SampleError(
                f"{where}: `content` has a part of type {kind!r:.40}; only parts of type 'text' "
                f"are allowed. Give reasoning as `reasoning_content`; images and audio need your "
                f"own TaskEncoder"
            )
        texts.append(part["text"])
    return "".join(texts)


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
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            arguments = None
        text = text if text.strip() else "{}"
    elif arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise SampleError(f"{place}: `arguments` are not a JSON object, as text or as it is")
    return arguments, text if isinstance(text, str) else json.dumps(arguments, ensure_ascii=False)
