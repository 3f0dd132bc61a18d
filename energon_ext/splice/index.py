# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Maps the number of an example to its document, start and offset in the order of its epoch."""

from typing import Callable, Sequence

import numpy as np

from energon_ext.errors import ConfigError
from energon_ext.keyed import KeyedPermutation, keyed_draws
from energon_ext.splice.config import MultiSpliceConfig, SpliceConfig, SpliceFields
from energon_ext.splice.pairs import Contents, PairTable, longest_content
from energon_ext.splice.quotas import epoch_quotas, turning_quotas
from energon_ext.splice.starts import GOLDEN, EdgeWeights, quantile_numbers

#: Maps places in an epoch to examples, numbered by document, start and offset.
Order = Callable[[np.ndarray], np.ndarray]

#: Name of the method that maps numbers to examples; states saved under another one are rejected.
ORDER = "even starts"

#: Step size around a circle for starts, as GOLDEN is for documents: N consecutive steps leave gaps
#: of at most 2.1 / N, or 1.9 / N. So if an epoch is too short for all documents or starts, later
#: epochs show the rest, and the low-discrepancy jitter is even. With the same step for both, a
#: document that comes up in one part of the circle would only show one part of its starts.
_SQUARE_ROOT = 2**0.5 - 1


class SpliceIndex:
    """Every example of every epoch, by number; its memory depends on the documents alone.

    Example ``n`` is number ``n % size`` of epoch ``n // size``, in an order that is a keyed
    bijection. A run only has to save how many examples it showed.

    Args:
        doc_lengths: tokens of each document.
        seq_len: S, positions per frame.
        config: configuration for one document or many.
        key: key of the source and seed of the run, which determine the orders.

    Attributes:
        quotas: [documents], examples per epoch; float64 averages if documents take turns.
        pairs: int64 [documents], different pairs (t, s), jitter excluded.
        size: examples per epoch.

    Raises:
        ConfigError: no document is long enough.

    Example:
        >>> config = MultiSpliceConfig(content_length=4, balance_mode="by_document",
        ...                            adaptive_k=False, shuffle_per_epoch=False)
        >>> index = SpliceIndex([7, 5, 3], 8, config)
        >>> contents = index.locate(np.arange(index.size))
        >>> contents.documents.tolist(), contents.starts.tolist(), contents.offsets.tolist()
        ([0, 0, 0, 0, 1, 1, 1, 1], [0, 1, 2, 3, 0, 0, 1, 1], [4, 4, 4, 4, 4, 4, 4, 4])
    """

    def __init__(
        self,
        doc_lengths: Sequence[int] | np.ndarray,
        seq_len: int,
        config: SpliceFields,
        key: str = "",
    ):
        self.doc_lengths = np.asarray(doc_lengths, np.int64)
        self.seq_len = seq_len
        self.config = config
        self._key = key
        self._table = PairTable(self.doc_lengths, seq_len, config)
        self._table.require_pairs()
        self.pairs = self.quotas = self._table.totals
        if isinstance(config, MultiSpliceConfig):
            self.quotas = epoch_quotas(config, self.doc_lengths, self.pairs)
        self.size = int(round(self.quotas.sum()))
        self._tokens = self.quotas * (self._table.tokens / np.maximum(self.pairs, 1))
        self._edges = None
        if config.alpha:
            content = longest_content(seq_len, config)
            self._edges = EdgeWeights(content, config.content_stride, config.alpha)
        self._seed = getattr(config, "seed", 0)
        self._first_turn = self._fractions(1, "turns")[0]
        self._first_phases = self._fractions(len(self.doc_lengths), "phases")
        self._epochs: dict[int, tuple[Order, np.ndarray, np.ndarray]] = {}

    def locate(self, numbers: np.ndarray) -> Contents:
        """Return examples by number.

        Args:
            numbers: int64 [n], >= 0, in any order and from any epochs.
        """
        epochs, examples = np.divmod(np.asarray(numbers, np.int64), self.size)
        documents, quotas, turns = (np.empty_like(examples) for _ in range(3))
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            order, counts, ends = self._epoch(epoch)
            examples[here] = order(examples[here])
            documents[here] = docs = np.searchsorted(ends, examples[here], side="right")
            quotas[here] = counts[docs]
            turns[here] = examples[here] - (ends[docs] - counts[docs])
        phases = (self._first_phases[documents] + epochs * _SQUARE_ROOT) % 1.0
        if self._edges is None:
            pair_numbers = quantile_numbers(self.pairs[documents], quotas, turns, phases)
        else:
            pair_numbers = self._edges.rows(self.pairs[documents], (turns + phases) / quotas)
        contents = self._table.locate(documents, pair_numbers)
        if self.config.offset_jitter:
            room = contents.offsets
            contents = contents._replace(offsets=room - self._jitter(epochs, examples, room))
        return contents

    def token_shares(self) -> np.ndarray:
        """Return the share of each document in all tokens, float [docs], for any ``alpha``."""
        return self._tokens / self._tokens.sum()

    def coverage(self) -> np.ndarray:
        """Return how often an epoch shows a token of each document on average, float [docs]."""
        return self._tokens / self.doc_lengths

    def views(self, document: int) -> np.ndarray:
        """Return how often an epoch shows each token of a document on average, float [L].

        Only for ``coverage_balanced``, where it depends on ``alpha``.

        Example:
            >>> config = MultiSpliceConfig(content_length=4, alpha=1.0, epoch_length=3)
            >>> index = SpliceIndex([6], 4, config)
            >>> (index.views(0) * 10).round().tolist()  # weights 4, 2, 4 of 3 examples
            [12.0, 18.0, 30.0, 30.0, 18.0, 12.0]
        """
        if self.config.placement != "coverage_balanced":
            raise ConfigError("views: only for coverage_balanced; coverage() works in every mode.")
        content, count = int(self._table.copy_lens[document]), int(self.pairs[document])
        weights = np.ones(count) if self._edges is None else self._edges.weights(count)
        starts = np.arange(count) * self.config.content_stride
        changes = np.zeros(int(self.doc_lengths[document]) + 1)
        changes[starts] += weights
        changes[starts + content] -= weights
        return changes.cumsum()[:-1] * (self.quotas[document] / max(1, weights.sum()))

    def _fractions(self, count: int, name: str) -> np.ndarray:
        """Draw where the circles of a run begin, float [count] in ``[0, 1)``."""
        bounds = np.full(count, 2**31)
        return keyed_draws(np.arange(count), bounds, f"{self._key}/{name}/{self._seed}") / 2**31

    def _epoch(self, epoch: int) -> tuple[Order, np.ndarray, np.ndarray]:
        """Return the order of an epoch, its quotas, and the last example + 1 of each document."""
        if epoch not in self._epochs:
            order = epoch_order(self.config, self.size, self._key, epoch, self._table)
            quotas = self.quotas
            if quotas.dtype.kind == "f":
                quotas = turning_quotas(quotas, (self._first_turn + epoch * GOLDEN) % 1.0)
            # Only neighbouring epochs are read together, so older ones can be dropped.
            kept = dict(list(self._epochs.items())[-1:])
            self._epochs = {**kept, epoch: (order, quotas, quotas.cumsum())}
        return self._epochs[epoch]

    def _jitter(self, epochs: np.ndarray, examples: np.ndarray, room: np.ndarray) -> np.ndarray:
        """Return how far contents move to the left, in ``[0, min(offset_jitter, room)]``."""
        bounds = np.minimum(self.config.offset_jitter, room) + 1
        if self.config.jitter_mode == "uniform":
            numbers = epochs * self.size + examples
            return keyed_draws(numbers, bounds, f"{self._key}/jitter/{self._seed}")
        # Even within an epoch; from one epoch to the next, an example moves by one place.
        places = (examples * GOLDEN % 1.0 * bounds).astype(np.int64)
        return (places + epochs) % bounds


def epoch_order(config: SpliceFields, size: int, key: str, epoch: int, table: PairTable) -> Order:
    """Return the order of an epoch of ``size`` examples, for a key as in :class:`SpliceIndex`."""
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
    """Return a random order by a key, or the identity without a key."""
    return np.asarray if key is None else KeyedPermutation(size, key)


def _axis_key(shuffle: bool | int, seed: int, epoch: int) -> str | None:
    return f"{seed}.{epoch // int(shuffle)}" if shuffle else None


class AxisOrder:
    """An order over consecutive rows of different lengths that shuffles the rows or the columns.

    With a key of None, that axis is not shuffled.
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
        # Apply the permutation of the longest row again until the column is within this row.
        while (outside := np.flatnonzero(columns >= counts)).size:
            columns[outside] = self._columns(columns[outside])
        return self._first[rows] + columns
