# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Reads the rows of tokenized documents."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from energon_ext.arguments import choices
from energon_ext.batch.columns import (
    DOCUMENT,
    LABEL_WEIGHTS,
    NUMBERS,
    TOKENS,
    VISIT,
    Column,
    check_described,
)
from energon_ext.batch.rows import Row
from energon_ext.errors import ConfigError, StoreError
from energon_ext.tokens.column_folder import ColumnFolder
from energon_ext.tokens.documents import Documents, FileFacts, Origin
from energon_ext.tokens.transformed import Changes, columns_of, read_columns

#: Approximate bytes per token in an object store.
_TOKEN_BYTES = 4


@dataclass(frozen=True)
class DocumentReader:
    """Reads the rows of one source.

    Attributes:
        documents: its documents.
        key: key of the source, set on every row.
        row_tokens: positions of a row.
        convert: makes of each row what the encoder's own ``batch`` expects; None to leave it.
        others: folders of columns of others, by the name of the column.
        changes: changes documents as they are read; None to read them as they are.
        counts_parts: whether rows have ``parts``.
        untrained: a token that is never trained as a label; None if there is none.
        numbers_documents: whether rows have the columns :data:`~energon_ext.batch.columns.NUMBERS`.
    """

    documents: Documents
    key: str
    row_tokens: int
    convert: Callable[[Row], Any] | None = None
    others: Mapping[str, ColumnFolder] = field(default_factory=dict)
    changes: Changes | None = None
    counts_parts: bool = False
    untrained: int | None = None
    numbers_documents: bool = False

    @property
    def columns(self) -> Mapping[str, Column]:
        found = columns_of(self.documents, self.others)
        return {**found, **NUMBERS} if self.numbers_documents else found

    @property
    def row_bytes(self) -> int:
        return self.row_tokens * _TOKEN_BYTES if self.documents.is_remote else 0

    def read(self, rows: Sequence[Any]) -> list[Any]:
        found = self.read_rows(rows)
        return found if self.convert is None else list(map(self.convert, found))

    def read_rows(self, rows: Sequence[Any]) -> list[Row]:
        """Read rows of :data:`~energon_ext.plan.packed_rows.Description`; look them up together."""
        pieces = _pieces_of(rows)
        try:
            found = self._read_columns(rows, pieces)
            parts = self._parts_of(*pieces) if self.counts_parts else None
        except StoreError as error:
            raise StoreError(f"{self.key}: {error}") from error
        tokens, weights = found.pop(TOKENS), found.pop(LABEL_WEIGHTS)
        if self.numbers_documents:
            found[DOCUMENT] = [np.int64(number) for number in pieces[0]]
            found[VISIT] = list(map(np.int32, _visits_of(rows)))
        has_weights = any(each is not None for each in weights)
        read, begin = [], 0
        for numbers, _, _, _, documents, num_tokens in rows:
            part = slice(begin, begin := begin + len(numbers))
            read.append(
                Row(
                    tokens[part],
                    self.key,
                    documents,
                    label_weights=weights[part] if has_weights else None,
                    parts=None if parts is None else parts[part],
                    num_tokens=num_tokens,
                    columns={name: values[part] for name, values in found.items()}
                    if found
                    else None,
                )
            )
        return read

    def _read_columns(
        self, rows: Sequence[Any], pieces: tuple[list[int], list[int], list[int]]
    ) -> dict[str, list[Any]]:
        if self.changes is None:
            return read_columns(self.documents, self.others, *pieces)
        return self.changes.read(self.documents, self.others, pieces, _visits_of(rows))

    def _parts_of(
        self, numbers: Sequence[int], starts: Sequence[int], stops: Sequence[int]
    ) -> list[tuple[int, int] | None]:
        """Return the trained labels before each piece and in its document; None for whole ones."""
        lengths = self.documents.lengths(np.array(numbers)).tolist()
        return [
            None if stop - start == length else self._part_of(number, start, length)
            for number, start, stop, length in zip(numbers, starts, stops, lengths)
        ]

    def _part_of(self, number: int, start: int, length: int) -> tuple[int, int]:
        """Return the trained labels before and in a piece's document, which may need all of it."""
        weights = self.documents.label_weights(number, 0, length)
        if weights is None and self.untrained is None:
            return start, length - 1  # the first token is not a label
        trained = np.ones(length, bool) if weights is None else weights != 0
        if self.untrained is not None:
            trained = trained & (self.documents.tokens(number, 0, length) != self.untrained)
        return int(trained[1 : start + 1].sum()), int(trained[1:].sum())

    def prefetch(self, rows: Sequence[Any]) -> None:
        if not self.documents.is_remote and not self.others:
            return
        numbers, starts, stops = _pieces_of(rows)
        if self.changes is not None:  # which needs them whole
            starts, stops = [0] * len(numbers), self.documents.lengths(np.array(numbers)).tolist()
        if self.documents.is_remote:
            self.documents.prefetch(numbers, starts, stops)
        for name, folder in self.others.items():
            folder.prefetch(name, numbers, starts, stops)

    def origin(self, number: int) -> Origin:
        return self.documents.origin(number)

    def describe_files(self) -> list[FileFacts]:
        return self.documents.describe_files()

    def tokens(self, number: int, start: int, stop: int) -> np.ndarray | None:
        if self.changes is not None:  # they are new in each visit
            return None
        return self.documents.tokens(number, start, stop)

    def read_stored(self, number: int) -> Sequence[Mapping[str, Any]]:
        return ()


def open_others(
    folders: Mapping[str, str], documents: Documents, where: str
) -> dict[str, ColumnFolder]:
    """Open the folders of columns of others, given by the name of each column.

    Raises:
        ConfigError: a folder lacks its column, belongs to other documents, or the documents have
            a column of that name themselves.
    """
    check_described(documents.columns, where)  # those of a user's store, too
    opened = {path: ColumnFolder.open(path) for path in {*folders.values()}}
    for folder in opened.values():
        folder.check_documents(documents, where)
    for name, path in folders.items():
        if name in documents.columns:
            raise ConfigError(f"{where}: the documents have a column {name} themselves; remove it.")
        if name not in opened[path].columns:
            found = choices(name, opened[path].columns)
            raise ConfigError(f"{where}: {path} has no column {name!r}; it has {found}")
    return {name: opened[path] for name, path in folders.items()}


def _pieces_of(rows: Sequence[Any]) -> tuple[list[int], list[int], list[int]]:
    """Return the numbers, starts and stops of the pieces of all rows."""
    numbers: list[int] = []
    starts: list[int] = []
    stops: list[int] = []
    for row in rows:
        numbers += row[0]
        starts += row[1]
        stops += row[2]
    return numbers, starts, stops


def _visits_of(rows: Sequence[Any]) -> list[int]:
    return [visit for row in rows for visit in row[3]]
