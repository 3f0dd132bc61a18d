# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The names of splits, and the rule that a folder with several of them is not one source."""

import os
import re
from collections.abc import Iterable

from energon_ext.errors import ConfigError

#: The splits that `energon-ext prepare` writes.
SPLITS = ("train", "val")

#: Words that mark the names of files and folders as parts of a split.
SPLIT_WORDS = (
    *("train", "training", "val", "valid", "validation", "dev", "eval", "evaluation"),
    *("test", "testing", "holdout", "heldout"),
)


def refuse_splits(folder: str, files: Iterable[str], *endings: str) -> None:
    """Raise ConfigError if files of several splits, such as train and test, are below a folder.

    A name belongs to a split if one of its words, between ``-``, ``.``, ``_`` and spaces, is one of
    SPLIT_WORDS, perhaps with a number at its end. Of a file below several folders, the outermost
    name with such a word counts.

    Args:
        folder: as the user named it.
        files: all files in it and below it, or what their names begin with.
        endings: of the files, where a pattern of some of them must name it.
    """
    found: dict[str, str] = {}
    begin = len(os.path.join(folder, ""))
    for file in files:
        parts = file[begin:].split("/")
        for depth, name in enumerate(parts):
            if (word := _split_word(name)) is not None:
                is_file = depth == len(parts) - 1
                suffix = next(filter(file.endswith, endings), "")
                shown = _pattern_of(name, word) + suffix if is_file else name
                found.setdefault(word, file[:begin] + "/".join([*parts[:depth], shown]))
                break
    if len(found) > 1:
        *others, last = sorted(found)
        example = found[min(found, key=SPLIT_WORDS.index)]
        raise ConfigError(
            f"{folder}: contains the splits {', '.join(others)} and {last}, which cannot be one "
            f"source; name one of them, such as {example}."
        )


def _split_word(name: str) -> str | None:
    """Return the first word of a name that marks a split."""
    return next((word for word in _words(name) if word in SPLIT_WORDS), None)


def _words(name: str) -> list[str]:
    """Return the words of a name, without the numbers at their ends."""
    return [word.rstrip("0123456789") for word in re.split(r"[-._ ]", name.lower())]


def _pattern_of(name: str, word: str) -> str:
    """Return a pattern of the files whose names have a word in the same place."""
    begin = _words(name).index(word)
    place = len("".join(re.split(r"([-._ ])", name)[: 2 * begin]))
    return ("*" if place else "") + name[place : place + len(word)] + "*"
