# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Tell fields of the text and of its training from metadata.

A field of a record or a message that nobody uses is refused if it belongs to the text or says what
is trained. All others are metadata (ids, scores, sources): they are ignored, and counted by name.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from energon_ext.chats.media import is_media, is_switch
from energon_ext.chats.reasoning import REASONING_FIELDS
from energon_ext.errors import SampleError

#: Names that say what is trained, such as `train_on_inputs`, `loss_mask` or `mask_history`. Only
#: `weight` of a message is understood.
_TRAINING = re.compile(
    r"(?:^|_)(?:train|trained|trainable|training|learn|loss|masks?|masked|supervised?|weights?)"
    r"(?:_|$)",
    re.IGNORECASE,
)

#: Fields of the data of preference training.
_PREFERENCES = ("chosen", "rejected", "kto_tag", "label")

#: Fields of a record that are text of its conversation. They are allowed if the messages contain
#: their text; those of a system message, if one of the messages is that.
_SYSTEM_FIELDS = ("system", "system_prompt", "system_message", "persona")
_TEXT_FIELDS = (
    *_SYSTEM_FIELDS,
    *("history", "prompt", "completion", "response", "instruction", "input", "output", "context"),
    *("functions", "available_tools", "function_call", "tool_calls", "documents", "document"),
    *("docs", "knowledge", *REASONING_FIELDS),
)

#: Variables of templates, which belong under `chat_template_kwargs`.
_VARIABLES = ("enable_thinking",)

#: Those that are text of a prompt; the others may be meant for the reward.
TEXT_OF_PROMPTS = (
    *_SYSTEM_FIELDS,
    *("history", "functions", "available_tools", "documents", "docs", "chat_template_kwargs"),
    *_VARIABLES,
)


def says_what_is_trained(name: str) -> bool:
    """Return True if a field of this name says which text is trained.

    Example:
        >>> [says_what_is_trained(name) for name in ("train_detail", "is_trained", "trainer_id")]
        [True, True, False]
    """
    return _TRAINING.search(name) is not None


def check_ignored(name: str, value: Any, where: str, messages: Any) -> None:
    """Raise SampleError if a field that nobody uses belongs to the text or to its training.

    Args:
        where: what does not use it, for the message.
        messages: those of the record, in OpenAI's format.
    """
    if says_what_is_trained(name):
        raise SampleError(
            f"`{name}` of a record is not understood; give answers a `weight` from 0 to 1 instead"
        )
    if name in _VARIABLES:
        raise SampleError(f"`{name}` is a variable of a template; put it into chat_template_kwargs")
    check_media(name, value, f"`{name}` next to {where}")
    if name in _PREFERENCES:
        _check_preference(name, value, messages)
    if name not in _TEXT_FIELDS or value in ("", [], {}):
        return
    if name in REASONING_FIELDS and is_switch(value):
        return
    roles = ("system", "developer") if name in _SYSTEM_FIELDS else None
    if not _is_said(value, messages, roles):
        raise SampleError(
            f"`{name}` next to {where} would not become part of the text; make it a message, or "
            f"remove it"
        )


def check_media(name: str, value: Any, place: str) -> None:
    """Raise SampleError for an image, audio or video; the place is for the message."""
    if is_media(name, value):
        raise SampleError(
            f"{place}: images, audio and video are not read, so the text would be trained without "
            f"them; write your own TaskEncoder for them, or remove the field"
        )


def _check_preference(name: str, value: Any, messages: Any) -> None:
    """Raise SampleError for preferences; the chosen answer may also be the conversation itself."""
    is_other = name == "label" and not (isinstance(value, bool) or value in (0, 1))
    if is_other or name == "rejected" or (name == "chosen" and _is_said(value, messages)):
        return
    raise SampleError(
        f"`{name}` belongs to a preference, which is not an answer to train on; for fine-tuning, "
        f"remove it, and the records that should not be trained"
    )


def _is_said(value: Any, messages: Any, roles: tuple[str, ...] | None = None) -> bool:
    """Return True if the messages contain all texts of a value; with roles, as whole messages."""
    found = [text.strip() for text in _texts(value)]
    if roles is None:
        return bool(found) and not has_other_text(value, messages)
    said = [m.get("content") for m in messages if isinstance(m, Mapping) and m.get("role") in roles]
    contents = [content.strip() for content in said if isinstance(content, str)]
    return bool(found) and all(text in contents for text in found)


def has_other_text(value: Any, messages: Any) -> bool:
    """Return True if a JSON value has a text that the messages do not contain.

    Example:
        >>> [has_other_text(value, "Why? Because.") for value in ("Why?", ["Because."], "cause", 7)]
        [False, False, True, False]
    """
    texts = "\n".join(_texts(messages))
    return any(not _is_within(text.strip(), texts) for text in _texts(value))


def _is_within(text: str, texts: str) -> bool:
    """Return True if a text is in another, and not only as a part of its words.

    Words are those of the alphabets that separate them by spaces, so any part of Chinese counts.
    """
    if not text or text not in texts:
        return not text
    words = rf"(?<![a-z0-9]){re.escape(text)}(?![a-z0-9])"
    return re.search(words, texts, re.IGNORECASE | re.ASCII) is not None


def _texts(value: Any) -> Iterator[str]:
    """Yield all texts within a JSON value, without the names of roles."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            if key not in ("role", "from"):
                yield from _texts(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _texts(each)
