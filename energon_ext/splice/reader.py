# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Reads the frames of spliced documents."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from energon_ext.batch.columns import TOKENS, Column
from energon_ext.batch.rows import Row
from energon_ext.splice.config import SpliceFields
from energon_ext.splice.pairs import Contents
from energon_ext.tokens.column_folder import ColumnFolder
from energon_ext.tokens.documents import Documents, FileFacts, Origin
from energon_ext.tokens.transformed import columns_of, read_columns


@dataclass(frozen=True)
class FrameReader:
    """Reads the frames of chosen documents, whose tokens are looked up once.

    Attributes:
        documents: all documents in the files of the source.
        first: number in the files of the document that the source calls 0.
        numbers, names: number of each chosen document in the source, and its name in batches.
        config: how frames are filled.
        fill_id: filler token before a content that attends to its prefix.
        others: folders of columns of others, by the name of the column.
    """

    documents: Documents
    first: int
    numbers: Sequence[int]
    names: Sequence[str]
    config: SpliceFields
    fill_id: int
    others: Mapping[str, ColumnFolder] = field(default_factory=dict)

    row_bytes = 0

    @functools.cached_property
    def chosen(self) -> dict[str, list[Any]]:
        """The tokens and further columns of the chosen documents."""
        numbers = np.array(self.numbers, np.int64) + self.first
        lengths = self.documents.lengths(numbers).tolist()
        pieces = numbers.tolist(), [0] * len(lengths), lengths
        found = read_columns(self.documents, self.others, *pieces)
        return {name: found[name] for name in (TOKENS, *self.columns)}

    @property
    def columns(self) -> Mapping[str, Column]:
        return columns_of(self.documents, self.others)

    def read(self, rows: Sequence[Any]) -> list[Row]:
        return list(map(self._read_frame, rows))

    def prefetch(self, rows: Sequence[Any]) -> None:
        """Do nothing: chosen documents are few and stay in memory."""

    def origin(self, number: int) -> Origin:
        return self.documents.origin(self.first + number)

    def describe_files(self) -> list[FileFacts]:
        return self.documents.describe_files()

    def tokens(self, number: int, start: int, stop: int) -> np.ndarray:
        return self.documents.tokens(self.first + number, start, stop)

    def read_stored(self, number: int) -> Sequence[Mapping[str, Any]]:
        return ()

    def _read_frame(self, frame: Contents) -> Row:
        documents, starts, offsets, lengths = (column.tolist() for column in frame)
        names = [self.names[document] for document in documents]
        contents = {
            name: list(map(self._content, itertools.repeat(name), documents, starts, lengths))
            for name in self.chosen
        }
        slices = contents.pop(TOKENS)
        if self.config.pack_contents:
            return Row(slices, slice_sources=names, first_positions=offsets, columns=contents)
        if self.config.attend_prefix:
            return self._row_with_prefix(slices[0], offsets[0], names[0], contents)
        return Row(
            slices,
            names[0],
            documents=1,
            first_positions=offsets,
            gaps=offsets,
            columns=contents,
        )

    def _content(self, name: str, document: int, start: int, length: int) -> np.ndarray:
        """Return ``length`` values of a document from ``start``; a view unless they wrap around."""
        values: np.ndarray = self.chosen[name][document]
        if name != TOKENS and self.columns[name].per == "document":
            return values
        wrapped = start + length - len(values)
        content = values[start : start + length]
        return content if wrapped <= 0 else np.concatenate([content, values[:wrapped]])

    def _row_with_prefix(
        self, content: np.ndarray, offset: int, name: str, columns: dict[str, list[np.ndarray]]
    ) -> Row:
        for each, column in self.columns.items():
            if column.per == "token":
                columns[each] = [np.concatenate([column.filled(offset), *columns[each]])]
        prefix = np.full(offset, self.fill_id, np.int64)
        if offset and self.config.eos_token_id is not None:
            prefix[-1] = self.config.eos_token_id
        label_weights = np.ones(offset + len(content), np.float32)
        label_weights[: offset + 1] = 0.0  # the first token of the content is not predicted
        tokens = np.concatenate([prefix, content])
        return Row(
            [tokens], source=name, documents=1, label_weights=[label_weights], columns=columns
        )
