# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""One document of an input, and the unit that it is read in."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from energon_ext.errors import ConfigError


@dataclass(frozen=True, slots=True)
class InputDocument:
    """One text, one conversation, or one sample of Energon."""

    text: str  # of a conversation, all of it as JSON; of a sample of the cache, empty
    origin: str  # where it was read: FILE, FILE:LINE, NAME[INDEX] or the key of a sample
    num_bytes: int = 0  # how much of the input it took, for the progress; 0 for its text
    sample: Any = None  # what an encoder takes, or the error that reading it raised
    split: str | None = None  # the one it was in and stays in; None where the text decides


#: Documents in order, and in place of one that cannot be read, why.
Documents = Iterator[InputDocument | ConfigError]


@dataclass(frozen=True)
class Unit:
    """A part of the input that depends on the input alone, and is prepared as a whole."""

    description: Mapping[str, Any]  # by which a change is noticed, in JSON; `path` is among them
    read: Callable[[], Documents]
    num_bytes: int = 0  # of its documents in all; 0 where that is not known beforehand


#: Makes a document of a JSON object: ``(object, origin, num_bytes) -> document``.
RowReader = Callable[[Any, str, int], InputDocument]


def text_under(key: str) -> RowReader:
    """Reads rows that have their text under a key; ConfigError for one that has not."""

    def read(row: Any, origin: str, num_bytes: int) -> InputDocument:
        check_object(row, origin)
        if key not in row:
            raise ConfigError(f"{origin}: no key {key!r}; it has {sorted(row)}. Choose with --key.")
        text = row[key]
        if not isinstance(text, str):
            raise ConfigError(f"{origin}: {key!r} must be a string, found {type(text).__name__}.")
        return InputDocument(text, origin, num_bytes)

    return read


def check_object(row: Any, origin: str) -> None:
    if not isinstance(row, dict):
        raise ConfigError(f"{origin}: expected a JSON object, found {type(row).__name__}.")
