# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Recognise fields with images, audio and video, by the words of their names and their values."""

import re
from collections.abc import Mapping
from numbers import Number
from typing import Any

#: Words for media.
_MEDIA = (
    r"(?:images?|imgs?|pictures?|photos?|screenshots?|pixels?|videos?|frames|audios?|wavs?|"
    r"waveforms?|spectrograms?|jpe?gs?|pngs?|gifs?|mp3s?|mp4s?|flacs?|attachments?)"
)
#: Words that also have other meanings, so that only a place makes them media (`speech_path`).
_SOMETIMES = (
    r"(?:frame|clips?|speech|voices?|sounds?|music|songs?|media|recordings?|cameras?|scenes?|"
    r"vision|visuals?)"
)
_PLACE = r"(?:(?:file)?(?:paths?|names?|files?)|urls?|uris?|links?|base64|b64|bytes)"

#: Names made of words that are joined by ``_``.
_NAME = re.compile(rf"(?:.*_)?(?:{_MEDIA}(?:{_PLACE})?|{_SOMETIMES}_?{_PLACE})\d*(?:_.*)?")
_PLACE_NAME = re.compile(rf"(?!names?$){_PLACE}(?:_{_PLACE})*")

_FILE = re.compile(
    r".*\.(?:jpe?g|png|gif|webp|bmp|tiff?|wav|mp3|flac|ogg|opus|m4a|mp4|avi|mov|mkv|webm)(?:\?.*)?",
    re.IGNORECASE | re.DOTALL,
)
_DATA = re.compile(r"data:(?:image|audio|video)/")

_SWITCHES = {"on", "off", "yes", "no", "true", "false"}


def is_media(name: str, value: Any) -> bool:
    """Return True if a field is an image, audio or video, or says where one is.

    A number or a switch under such a name is metadata, such as the number of frames.

    Example:
        >>> fields = {"image_path": "a.jpg", "audioUrl": "a", "path": "a.wav", "image_id": 3}
        >>> [is_media(name, value) for name, value in fields.items()]
        [True, True, True, False]
    """
    words = _words(name)
    if _NAME.fullmatch(words):
        return _has_value(value)
    texts = value if isinstance(value, (list, tuple)) else [value]
    is_place = _PLACE_NAME.fullmatch(words) is not None
    return any(
        isinstance(text, str)
        and (_DATA.match(text) is not None or (is_place and _FILE.fullmatch(text) is not None))
        for text in texts
    )


def is_switch(value: Any) -> bool:
    """Return True for a value that only says yes or no."""
    return str(value).strip().lower() in _SWITCHES


def _words(name: str) -> str:
    """Return a name with its words in lower case, joined by ``_``."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|[^A-Za-z0-9]+", "_", name).lower()


def _has_value(value: Any, is_part: bool = False) -> bool:
    """Return True for more than a number or a switch, or for a list of numbers."""
    if value is None or isinstance(value, Number):
        return is_part and value is not None
    if isinstance(value, str):
        return bool(value.strip()) and not is_switch(value)
    if isinstance(value, Mapping):
        return any(_has_value(each, True) for each in value.values())
    if isinstance(value, (list, tuple)):
        return any(_has_value(each, True) for each in value)
    return True  # bytes, or an object of a library for images
