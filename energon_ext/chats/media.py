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
    r"waveforms?|spectrograms?|jpe?gs?|pngs?|gifs?|webps?|bmps?|tiffs?|heics?|mp3s?|mp4s?|flacs?|"
    r"attachments?)"
)
#: Words that also have other meanings, so that only a place makes them media (`speech_path`), or
#: the name of a file.
_SOMETIMES = (
    r"(?:frame|clips?|speech|voices?|sounds?|music|songs?|media|recordings?|utterances?|cameras?|"
    r"scenes?|scans?|vision|visuals?|figures?|charts?|plots?|diagrams?|thumbnails?)"
)
_PLACE = r"(?:(?:file)?(?:paths?|names?|files?)|urls?|uris?|links?|base64|b64|bytes)"

#: Names made of words that are joined by ``_``.
_NAME = re.compile(rf"(?:.*_)?(?:{_MEDIA}(?:{_PLACE})?|{_SOMETIMES}_?{_PLACE})\d*(?:_.*)?")
_NAME_OF_FILES = re.compile(rf"(?!names?$){_PLACE}(?:_{_PLACE})*|(?:.*_)?{_SOMETIMES}\d*(?:_.*)?")

_FILE = re.compile(
    r".*\.(?:jpe?g|png|gif|webp|bmp|tiff?|svg|heic|wav|mp3|flac|ogg|opus|m4a|mp4|avi|mov|mkv|webm)"
    r"(?:\?.*)?",
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
    values = value if isinstance(value, (list, tuple)) else [value]
    objects = [each for each in values if isinstance(each, Mapping)]
    if any(map(_is_feature, objects)):
        return True
    names_files = _NAME_OF_FILES.fullmatch(words) is not None
    texts = [*values, *(text for each in objects if names_files for text in each.values())]
    return any(
        isinstance(text, str)
        and (_DATA.match(text) is not None or (names_files and _FILE.fullmatch(text) is not None))
        for text in texts
    )


def _is_feature(value: Mapping[str, Any]) -> bool:
    """Return True for an image or audio as the library ``datasets`` has it, whatever its name."""
    if not value.keys() <= {"bytes", "path"}:
        return {"array", "sampling_rate"} <= value.keys()
    path = value.get("path")
    return bool(value.get("bytes")) or (isinstance(path, str) and _FILE.fullmatch(path) is not None)


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
