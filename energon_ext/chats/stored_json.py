# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Values as files store them: with the nulls of Arrow, or as JSON text.

Arrow stores a key that one row has in all rows (Parquet, ``datasets``), as null. To avoid that,
people store lists of messages, tools and calls as JSON text, which keeps its own nulls.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from energon_ext.chats.roles import ROLES, SHAREGPT_CALL, SHAREGPT_ROLES
from energon_ext.data_files import RepeatedKeyError, parse_record
from energon_ext.errors import SampleError

#: Most levels of a record within each other.
_MOST_LEVELS = 100
_TOO_DEEP = f"has more than {_MOST_LEVELS} lists and objects within each other"

#: Fields of a record that may have messages, and those that may have a text instead.
_NEVER_TEXT = ("messages", "conversations")
_LISTS = (*_NEVER_TEXT, "conversation", "prompt", "completion", "response", "chosen", "rejected")

#: Fields of a message, at least one of which a message has.
_SAID = ("content", "tool_calls", "function_call")

#: Fields with which messages may begin.
_KEYS = r"role|from|content|value|messages|weight|id|index|name|type|tool_\w+"
_KNOWN_ROLES = (*ROLES, *SHAREGPT_ROLES, SHAREGPT_CALL)

#: Messages in a text that is not JSON: how they begin, and what each of them has.
_OPEN = r"""[\s(\[{"'\\]{0,40}"""
_BEGIN = re.compile(
    rf"""(?=\W*?[\[{{]|array)(?:{_OPEN}array)?{_OPEN}["'\\](?:{_KEYS})["'\\]+\s*:"""
)
_ROLE = re.compile(
    rf"""["'\\](?:role|from)["'\\]+\s*:\s*["'\\]+(?:{"|".join(_KNOWN_ROLES)})["'\\]"""
)
_WORDS = re.compile(rf"""["'\\](?:value|{"|".join(_SAID)})["'\\]+\s*:""")


def remove_nulls(value: Any, levels: int = _MOST_LEVELS) -> Any:
    """Remove the keys whose value is null, at any depth.

    Nulls in lists and in JSON text stay.

    Example:
        >>> remove_nulls({"city": "Lisbon", "names": None, "list": [None, {"a": None}]})
        {'city': 'Lisbon', 'list': [None, {}]}
    """
    if isinstance(value, str) or not isinstance(value, (Mapping, list, tuple)):
        return value
    if not levels:
        raise SampleError(_TOO_DEEP)
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


def parse_json(text: str, name: str) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: it is not JSON.
        SampleError: it has too many levels, or a key twice; the message begins with the name.
    """
    try:
        value = parse_record(text)
        remove_nulls(value)  # which counts the levels
    except RepeatedKeyError as error:
        raise SampleError(f"{name}: {error}") from None
    except (RecursionError, SampleError):
        raise SampleError(f"{name} {_TOO_DEEP}") from None
    return value


def read_json(value: Any, name: str, kind: Any) -> Any:
    """Return a value of a kind, which may be given as JSON text; an empty text is None."""
    if isinstance(value, str):
        try:
            value = parse_json(_unquote(value), name) if value.strip() else None
        except SampleError:
            raise
        except ValueError as error:
            raise SampleError(f"{name} is text, but not JSON ({error})") from error
    if value is not None and not isinstance(value, kind):
        needed = "a list" if kind is list else "an object"
        raise SampleError(f"{name} is a {type(value).__name__}, {needed} is needed")
    return value


def read_objects(value: Any, name: str) -> list[Any] | None:
    """Return a list of objects; the list, or each of its objects, may be given as JSON text.

    Other elements stay, and are refused where the objects are used.
    """
    found = read_json(value, name, list)
    if found is None:
        return None
    return [
        _object_or_text(each, f"{name}[{number}]") if isinstance(each, str) else each
        for number, each in enumerate(found)
    ]


def _object_or_text(text: str, name: str) -> Any:
    try:
        value = parse_json(text, name)
    except SampleError:
        raise
    except ValueError:
        return text
    return value if isinstance(value, Mapping) else text


def read_lists(record: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return a record whose messages are lists, and the fields in which they were JSON text.

    A text is taken as messages if it is a list of them, a message, or an object with ``messages``,
    and an object is if it has ``messages``. Any other text is text.

    Raises:
        SampleError: an object has other fields next to ``messages``, or a text has messages, but
            not as JSON.

    Example:
        >>> read_lists({"prompt": '[{"role": "user", "content": "Hi"}]', "response": "[1]"})
        ({'prompt': [{'role': 'user', 'content': 'Hi'}], 'response': '[1]'}, ['prompt'])
    """
    found, texts = dict(record), []
    for name in _LISTS:
        value = record.get(name)
        messages = _messages_of(value, name)
        if messages is None:
            continue
        found[name] = messages
        if not isinstance(value, Mapping):
            texts.append(name)
    return found, texts


def _messages_of(value: Any, name: str) -> list[Any] | None:
    """Return the messages in JSON text or in an object; None for everything else."""
    texts, keys = [value], []
    found = _parse(value)
    is_text = found is not value
    if isinstance(found, Mapping) and "messages" in found:
        keys = [key for key, each in found.items() if each is not None]
        found, inner = _parse(found["messages"]), found["messages"]
        is_text = is_text or found is not inner
        texts.append(inner)
    elif is_text and are_messages([found]):
        found = [found]
    if found is None and isinstance(value, str):
        _check_not_printed(value, name)
    if not (is_text or keys) or not isinstance(found, list):
        return None
    if name not in _NEVER_TEXT and not are_messages(found):
        return None
    if len(keys) > 1:
        other = next(key for key in keys if key != "messages")
        raise SampleError(
            f"`{name}` has {other!r:.40} next to `messages`; make both fields of the record, or, "
            f"if the JSON is a text, make it the `content` of a message"
        )
    _check_keys(texts, f"`{name}`")
    return [_with_text_arguments(message) if is_text else message for message in found]


def _check_not_printed(text: str, name: str) -> None:
    """Raise SampleError for messages as Python or NumPy prints them, or one JSON text a line."""
    if all((_BEGIN.match(text[:200].lstrip()), _ROLE.search(text), _WORDS.search(text))):
        raise SampleError(
            f"`{name}` is text that begins like messages, but is not JSON; write them with "
            f"json.dumps, or, if they are a text, make it the `content` of a message"
        )


def _check_keys(texts: Sequence[Any], name: str) -> None:
    """Raise SampleError if JSON texts, or lists of them, that are messages have a key twice."""
    for text in texts:
        for each in text if isinstance(text, (list, tuple)) else [text]:
            if isinstance(each, str) and _parse_or_none(each) is not None:
                parse_json(_unquote(each), name)


def _parse(value: Any) -> Any:
    """Return what a JSON text holds, or each text of a list; every other value as it is."""
    if isinstance(value, str):
        return _parse_or_none(value)
    if isinstance(value, (list, tuple)) and value and all(isinstance(each, str) for each in value):
        return [_parse_or_none(each) for each in value]
    return value


def _parse_or_none(text: str) -> Any:
    """Return the list or object in a JSON text; None for any other text."""
    text = _unquote(text)
    if text.lstrip()[:1] not in ("[", "{"):
        return None
    try:
        value = json.loads(text)
        remove_nulls(value)
    except (ValueError, RecursionError):  # what is too deep is not a list of messages
        return None
    return value


def _unquote(text: str) -> str:
    """Return the text within a JSON text, where a text was stored as JSON more than once."""
    while text.lstrip()[:1] == '"':
        try:
            inner = json.loads(text)
        except ValueError:
            break
        text = inner
    return text


def are_messages(values: Sequence[Any]) -> bool:
    """Return True for what can only be messages: other JSON may have a `role` or `from`, too."""
    if not values or not all(isinstance(each, Mapping) for each in values):
        return False
    is_form = all(
        ("role" in each and any(name in each for name in _SAID))
        or ("from" in each and "value" in each)
        for each in values
    )
    return is_form and values[0].get("role", values[0].get("from")) in _KNOWN_ROLES


def are_parts(text: str) -> bool:
    """Return True for the parts of a content as JSON text.

    Example:
        >>> are_parts('[{"type": "text", "text": "Hi"}]'), are_parts('[{"text": "Hi"}]')
        (True, False)
    """
    parts = _parse_or_none(text)
    if not isinstance(parts, list) or not all(isinstance(part, Mapping) for part in parts):
        return False
    kinds = [part.get("type") for part in parts]
    return "text" in kinds and all(isinstance(kind, str) for kind in kinds)


def _with_text_arguments(message: Any) -> Any:
    """Return a message whose calls have their arguments as text, which keeps their nulls."""
    calls = message.get("tool_calls") if isinstance(message, Mapping) else None
    if not isinstance(calls, list):
        return message
    return {**message, "tool_calls": [with_text_arguments(call) for call in calls]}


def with_text_arguments(call: Any) -> Any:
    """Return a call that was JSON text with its arguments as such, which keeps their nulls."""
    if not isinstance(call, Mapping):
        return call
    if isinstance(function := call.get("function"), Mapping):
        return {**call, "function": with_text_arguments(function)}
    arguments = call.get("arguments")
    if not isinstance(arguments, dict):
        return call
    return {**call, "arguments": json.dumps(arguments, ensure_ascii=False)}
