# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""One document of an input, the unit that it is read in, and what is left out."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from energon_ext.errors import ConfigError


@dataclass(frozen=True, slots=True)
class InputDocument:
    """One text, one conversation, or one sample of Energon."""

    text: str  # of a conversation, all of it as JSON; of a sample of the cache, empty
    origin: str  # where it was read: FILE, FILE:LINE, NAME[INDEX] or the key of a sample
    num_bytes: int = 0  # how much of the input it took, for the progress; 0 for its text
    sample: Any = None  # what an encoder takes, or the error that reading it raised
    split: str | None = None  # the one it was in and stays in; None where the text decides


@dataclass
class LeftOut:
    """How many documents are left out, and why the first one is."""

    count: int = 0
    first: str = ""
    in_a_row: int = 0

    def add(self, error: Exception) -> None:
        self.count += 1
        self.in_a_row += 1
        self.first = self.first or str(error)

    def to_json(self) -> dict[str, Any]:
        return {"count": self.count, "first": self.first}


@dataclass
class Unreadable(LeftOut):
    """Around the reading of a document: an error ends the preparation, or is counted."""

    skip: bool = False

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> bool:
        if not self.skip or not isinstance(error, ConfigError):
            return False
        self.add(error)
        return True


class Unit(Protocol):
    """A part of the input that depends on the input alone, and is prepared as a whole.

    Attributes:
        num_bytes: that its documents take in all; 0 where that is not known beforehand.
    """

    @property
    def num_bytes(self) -> int: ...

    def describe(self) -> dict[str, Any]:
        """JSON values by which a change of the part is noticed; ``path`` is among them."""

    def read(self, unreadable: Unreadable) -> Iterator[InputDocument]:
        """Its documents in order; ConfigError for what cannot be read."""


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
