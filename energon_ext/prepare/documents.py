# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Documents of an input, and the units in which they are read."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from energon_ext.batch.columns import Column, check_values
from energon_ext.errors import ConfigError, SampleError


@dataclass(frozen=True, slots=True)
class InputDocument:
    """A text, a conversation, or an Energon sample."""

    text: str  # a conversation as JSON; empty for a sample of the cache
    origin: str  # where it was read: FILE, FILE:LINE, NAME[INDEX] or the key of a sample
    num_bytes: int = 0  # size in the input, for the progress bar; 0 to use the size of the text
    sample: Any = None  # input of an encoder, or the error raised by reading it
    split: str | None = None  # the split it stays in; None to choose it by a hash of the text
    columns: Mapping[str, Any] = field(default_factory=dict)  # taken from its record


#: Documents in order, with an error in place of each one that cannot be read.
Documents = Iterator[InputDocument | ConfigError]


@dataclass(frozen=True)
class Unit:
    """A part of the input, which is prepared as a whole; the input alone determines the parts."""

    description: Mapping[str, Any]  # JSON values that reveal a change; includes `path`
    read: Callable[[], Documents]
    num_bytes: int = 0  # total size of its documents; 0 if not known in advance
    #: Reads only some documents, by their places in the unit.
    pick: Callable[[Iterable[int]], Documents] | None = None


#: Converts a JSON object to a document: ``(object, origin, num_bytes) -> document``.
RowReader = Callable[[Any, str, int], InputDocument]


def text_under(key: str) -> RowReader:
    """Return a reader of rows whose text is under a key; it raises ConfigError for other rows."""

    def read(row: Any, origin: str, num_bytes: int) -> InputDocument:
        check_object(row, origin)
        if key not in row:
            raise ConfigError(f"{origin}: no key {key!r}; it has {sorted(row)}. Choose with --key.")
        text = row[key]
        if not isinstance(text, str):
            found = f"{key!r}: {type(text).__name__} found"
            raise ConfigError(f"{origin}: {found}, a string is needed.")
        return InputDocument(text, origin, num_bytes)

    return read


def with_columns(read_row: RowReader, columns: Mapping[str, Column]) -> RowReader:
    """Return a reader of rows that also takes columns per document from fields of their names.

    It raises ConfigError for rows without a number in such a field.
    """

    def read(row: Any, origin: str, num_bytes: int) -> InputDocument:
        check_object(row, origin)
        values = {}
        for name, column in columns.items():
            if not isinstance(row.get(name), (int, float)):
                found = f"{row[name]!r:.80} found" if name in row else "missing"
                raise ConfigError(f"{origin}: {name!r}: {found}, a number is needed for --column.")
            try:
                values[name] = check_values(name, column, row[name], 1, origin)
            except SampleError as error:
                raise ConfigError(str(error)) from error
        rest = {name: value for name, value in row.items() if name not in columns}
        return replace(read_row(rest, origin, num_bytes), columns=values)

    return read


def check_object(row: Any, origin: str) -> None:
    if not isinstance(row, dict):
        raise ConfigError(f"{origin}: {type(row).__name__} found, a JSON object is needed.")
