# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""In which order the examples of an epoch come."""

from __future__ import annotations

import functools
from typing import Any, Callable

import numpy as np

from energon_ext.documents.permutation import KeyedPermutation
from energon_ext.splice.config import MultiSpliceConfig, SpliceConfig, SpliceFields

#: ``place in the epoch -> example, in the order of documents, starts and offsets``
Order = Callable[[np.ndarray], np.ndarray]


class EpochOrders:
    """The order of every epoch.

    Args:
        config: says what is shuffled and how often anew.
        size: examples in an epoch.
        key: of the source and the seed.
        row_counts: the examples of each start of a single document, called only where one axis is
            shuffled and the other is not.
    """

    def __init__(
        self, config: SpliceFields, size: int, key: str, row_counts: Callable[[], np.ndarray]
    ):
        self._config, self._size, self._key = config, size, key
        self._row_counts = row_counts
        # Neighbouring epochs are read together, older ones no more.
        self.of = functools.lru_cache(maxsize=2)(self._make)

    def _make(self, epoch: int) -> Order:
        config = self._config
        if isinstance(config, MultiSpliceConfig):
            if not config.shuffle_per_epoch:
                return lambda places: places
            return KeyedPermutation(self._size, f"{self._key}/{config.seed}/{epoch}")
        assert isinstance(config, SpliceConfig)
        content = _axis_key(config.shuffle_content, config.content_seed, epoch)
        offsets = _axis_key(config.shuffle_offsets, config.offset_seed, epoch)
        if content is None and offsets is None:
            return lambda places: places
        if content is not None and offsets is not None:
            return KeyedPermutation(self._size, f"{self._key}/{content}/{offsets}")
        return AxisOrder(
            self._row_counts(),
            None if content is None else f"{self._key}/content/{content}",
            None if offsets is None else f"{self._key}/offsets/{offsets}",
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "of": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.of = functools.lru_cache(maxsize=2)(self._make)


def _axis_key(shuffle: bool | int, seed: int, epoch: int) -> str | None:
    return f"{seed}.{epoch // int(shuffle)}" if shuffle else None


class AxisOrder:
    """Rows of different lengths, one after another, with the rows or the places in them shuffled.

    Unlike a permutation of everything this holds two numbers per row.

    Args:
        row_counts: int64 [rows], each >= 1.
        row_key: order of the rows; None for as they are.
        column_key: order within a row; None for as it is.
    """

    def __init__(self, row_counts: np.ndarray, row_key: str | None, column_key: str | None):
        self._counts = row_counts
        self._first = np.cumsum(row_counts) - row_counts
        rows = np.arange(len(row_counts))
        self._rows = rows if row_key is None else KeyedPermutation(len(rows), row_key)(rows)
        self._ends = np.cumsum(row_counts[self._rows])
        self._columns = (
            None if column_key is None else KeyedPermutation(int(row_counts.max()), column_key)
        )

    def __call__(self, places: np.ndarray) -> np.ndarray:
        slots = np.searchsorted(self._ends, places, side="right")
        rows = self._rows[slots]
        counts = self._counts[rows]
        columns = places - (self._ends[slots] - counts)
        if self._columns is not None:
            columns = self._columns(columns)
            # A permutation of the longest row, walked until it is back in this one.
            while (outside := np.flatnonzero(columns >= counts)).size:
                columns[outside] = self._columns(columns[outside])
        return self._first[rows] + columns
