# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""A source of a blend: what names it, and for a planned one its rows and who reads them."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Protocol

import numpy as np

from energon_ext.batch.columns import Column
from energon_ext.plan.rows import Rows
from energon_ext.state.match import SourceNames
from energon_ext.state.schema import digest_of
from energon_ext.tokens.documents import FileFacts, Origin
from energon_ext.weights import WeightSpec


class Reader(Protocol):
    """Reads the rows of one source, in any process; it has no part in the plan."""

    @property
    def columns(self) -> Mapping[str, Column]:
        """Columns that its rows may have beside tokens and label weights."""

    @property
    def row_bytes(self) -> int:
        """Approximate bytes per row if prefetching rows helps, else 0."""

    def read(self, rows: Sequence[Any]) -> list[Any]:
        """Read some rows of a batch, each given by its description."""

    def prefetch(self, rows: Sequence[Any]) -> None:
        """Ask the storage to prefetch rows."""

    def origin(self, number: int) -> Origin:
        """Return where a document or sample comes from."""

    def tokens(self, number: int, start: int, stop: int) -> np.ndarray | None:
        """Return tokens of a document; None if it has none before it is encoded."""

    def describe_files(self) -> list[FileFacts]:
        """Return its files in order, with what the plan depends on; empty if they are unknown."""

    def read_stored(self, number: int) -> Sequence[Mapping[str, Any]]:
        """Return the files of a sample by extension, to display them; empty for tokens."""


@dataclass(frozen=True, eq=False)
class Source(ABC):
    """A source of a blend: its names, and how often it is read.

    Attributes:
        key: its identity, see :func:`energon_ext.config.source_key.source_key`.
        documents: number of documents in one epoch.
        max_epochs: epochs after which its rows end, or None.
        names: names that find its state if the key has changed.
        shown_as: its display name, if it has one.
        loss_weight: factor of its labels in the loss, None for 1. No row depends on it.
    """

    key: str
    _: KW_ONLY
    documents: int = 0
    max_epochs: int | None = None
    names: SourceNames = SourceNames()
    shown_as: str | None = None
    loss_weight: WeightSpec | None = None

    @property
    def shuffle_name(self) -> str:
        """The name that decides its order, which is the same if all data moves."""
        return self.names.shuffle_key or self.key

    @abstractmethod
    def identity(self) -> list[Any]:
        """Return everything but its weight that decides which rows it has, as JSON values.

        There is no path in it.
        """

    @functools.cached_property
    def state_names(self) -> SourceNames:
        """Its names as a state contains them, with its content."""
        return self.names._replace(content=digest_of(self.content)[:16])

    @property
    @abstractmethod
    def content(self) -> Mapping[str, Any]:
        """JSON values that change with its documents."""

    @property
    def parts(self) -> Mapping[str, tuple[float, float]]:
        """``(documents in one epoch, share of its tokens)`` of each part, by key in batches."""
        return {self.key: (self.documents, 1.0)}

    @property
    def can_exclude(self) -> bool:
        """True if single documents can be left out."""
        return False

    @property
    def fullest(self) -> float:
        """The largest part of a row that its documents can fill, 1 for all of it."""
        return 1.0

    def describe_files(self) -> list[FileFacts]:
        """Return its files in order, with what the plan depends on; empty if they are unknown."""
        return []


@dataclass(frozen=True, eq=False)
class PlannedSource(Source):
    """A source whose rows are planned from lengths, and read by any process.

    Attributes:
        first_rows: its rows before the first one is taken; they never move.
        reader: reads them.
    """

    first_rows: Rows
    reader: Reader

    def rows(self) -> Rows:
        """Return its rows from the first one on."""
        return self.first_rows.at(self.first_rows.window, self.first_rows.next_row)

    def identity(self) -> list[Any]:
        rows = self.first_rows
        return [self.shuffle_name, rows.kind, rows.fingerprint, rows.options()]

    @property
    def content(self) -> Mapping[str, Any]:
        return self.first_rows.fingerprint

    @property
    def parts(self) -> Mapping[str, tuple[float, float]]:
        return self.first_rows.parts or super().parts

    @property
    def can_exclude(self) -> bool:
        return self.first_rows.can_exclude

    @property
    def fullest(self) -> float:
        return self.first_rows.fullest

    def describe_files(self) -> list[FileFacts]:
        return self.reader.describe_files()
