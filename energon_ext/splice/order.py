# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The order of the examples of an epoch."""

from typing import Callable

import numpy as np

from energon_ext.documents.permutation import KeyedPermutation
from energon_ext.splice.config import MultiSpliceConfig, SpliceConfig, SpliceFields
from energon_ext.splice.pairs import PairTable

#: ``place in the epoch -> example, in the order of documents, starts and offsets``
Order = Callable[[np.ndarray], np.ndarray]


def epoch_order(config: SpliceFields, size: int, key: str, epoch: int, table: PairTable) -> Order:
    """The order of an epoch of ``size`` examples; the key names the source and the run's seed."""
    if isinstance(config, MultiSpliceConfig):
        return _order(size, f"{key}/{config.seed}/{epoch}" if config.shuffle_per_epoch else None)
    assert isinstance(config, SpliceConfig)
    content = _axis_key(config.shuffle_content, config.content_seed, epoch)
    offsets = _axis_key(config.shuffle_offsets, config.offset_seed, epoch)
    if content and offsets:
        return _order(size, f"{key}/{content}/{offsets}")
    return AxisOrder(
        table.row_counts(0),
        f"{key}/content/{content}" if content else None,
        f"{key}/offsets/{offsets}" if offsets else None,
    )


def _order(size: int, key: str | None) -> Order:
    """A random order by a key, or without one the numbers as they are."""
    return np.asarray if key is None else KeyedPermutation(size, key)


def _axis_key(shuffle: bool | int, seed: int, epoch: int) -> str | None:
    return f"{seed}.{epoch // int(shuffle)}" if shuffle else None


class AxisOrder:
    """Rows of different lengths, one after another, with the rows or the places in them shuffled.

    A key of None leaves the order of the rows, or that in each row, as it is.
    """

    def __init__(self, row_counts: np.ndarray, row_key: str | None, column_key: str | None):
        self._counts = row_counts
        self._first = np.cumsum(row_counts) - row_counts
        self._rows = _order(len(row_counts), row_key)(np.arange(len(row_counts)))
        self._ends = np.cumsum(row_counts[self._rows])
        self._columns = _order(int(row_counts.max()), column_key)

    def __call__(self, places: np.ndarray) -> np.ndarray:
        slots = np.searchsorted(self._ends, places, side="right")
        rows = self._rows[slots]
        counts = self._counts[rows]
        columns = self._columns(places - (self._ends[slots] - counts))
        # A permutation of the longest row, walked until it is back in this one.
        while (outside := np.flatnonzero(columns >= counts)).size:
            columns[outside] = self._columns(columns[outside])
        return self._first[rows] + columns
