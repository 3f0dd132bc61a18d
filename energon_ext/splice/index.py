# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""From the number of an example to its place in the order of its epoch, document, start, offset."""

from typing import Callable, Sequence

import numpy as np

from energon_ext.documents.permutation import KeyedPermutation, keyed_draws
from energon_ext.errors import ConfigError
from energon_ext.splice.config import MultiSpliceConfig, SpliceConfig, SpliceFields
from energon_ext.splice.pairs import Contents, PairTable, longest_content
from energon_ext.splice.quotas import epoch_quotas, turning_quotas
from energon_ext.splice.starts import EdgeWeights, quantile_numbers

#: ``place in the epoch -> example, in the order of documents, starts and offsets``
Order = Callable[[np.ndarray], np.ndarray]

#: Names how an example is found from its number; states of another are refused.
ORDER = "even starts"

#: Steps around a circle. Any N steps in a row leave no gap wider than 1.9 / N and 2.1 / N. So an
#: epoch that is too short for all documents or starts is followed by others that show the rest,
#: and the low-discrepancy jitter is even. Documents and starts have steps of their own: with one
#: for both, a document that comes up at one part of the circle would show one part of its starts.
_GOLDEN = (5**0.5 - 1) / 2
_SQUARE_ROOT = 2**0.5 - 1


class SpliceIndex:
    """Every example of every epoch, by number, in memory that depends on the documents alone.

    Example ``n`` is the ``n % size``-th of epoch ``n // size``, in an order that is a keyed
    bijection. All that a run has to remember is how many examples it showed.

    Args:
        doc_lengths: tokens of each document.
        seq_len: S, positions of a frame.
        config: of one document or many.
        key: of the source and the run's seed; names the orders.

    Attributes:
        quotas: [documents], examples in an epoch; float64 averages where documents take turns.
        pairs: int64 [documents], different pairs (t, s), the jitter left out.
        size: examples in an epoch.

    Raises:
        ConfigError: nothing to show: no document is long enough.

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
        """Find examples by number.

        Args:
            numbers: int64 [n], >= 0; any order, any epochs.
        """
        epochs, examples = np.divmod(np.asarray(numbers, np.int64), self.size)
        documents, quotas, own = (np.empty_like(examples) for _ in range(3))
        for epoch in np.unique(epochs).tolist():
            now = epochs == epoch
            order, of_epoch, ends = self._epoch(epoch)
            examples[now] = order(examples[now])
            documents[now] = found = np.searchsorted(ends, examples[now], side="right")
            quotas[now] = of_epoch[found]
            own[now] = examples[now] - (ends[found] - of_epoch[found])
        phases = (self._first_phases[documents] + epochs * _SQUARE_ROOT) % 1.0
        if self._edges is None:
            chosen = quantile_numbers(self.pairs[documents], quotas, own, phases)
        else:
            chosen = self._edges.rows(self.pairs[documents], (own + phases) / quotas)
        contents = self._table.locate(documents, chosen)
        if self.config.offset_jitter:
            room = contents.offsets
            contents = contents._replace(offsets=room - self._jitter(epochs, examples, room))
        return contents

    def token_shares(self) -> np.ndarray:
        """Share of each document in all tokens; float [docs]. Edge weights do not move it."""
        return self._tokens / self._tokens.sum()

    def coverage(self) -> np.ndarray:
        """How often an epoch shows a token of each document, on average; float [docs]."""
        return self._tokens / self.doc_lengths

    def views(self, document: int) -> np.ndarray:
        """How often an epoch shows each token of a document on average, by ``alpha``; float [L].

        Of ``coverage_balanced`` alone.

        Example:
            >>> config = MultiSpliceConfig(content_length=4, alpha=1.0, epoch_length=3)
            >>> index = SpliceIndex([6], 4, config)
            >>> (index.views(0) * 10).round().tolist()  # weights 4, 2, 4 of 3 examples
            [12.0, 18.0, 30.0, 30.0, 18.0, 12.0]
        """
        if self.config.placement != "coverage_balanced":
            raise ConfigError("views: of coverage_balanced alone; coverage() is of every mode.")
        content, count = int(self._table.copy_lens[document]), int(self.pairs[document])
        weights = np.ones(count) if self._edges is None else self._edges.of(count)
        starts = np.arange(count) * self.config.content_stride
        changes = np.zeros(int(self.doc_lengths[document]) + 1)
        changes[starts] += weights
        changes[starts + content] -= weights
        return changes.cumsum()[:-1] * (self.quotas[document] / max(1, weights.sum()))

    def _fractions(self, count: int, name: str) -> np.ndarray:
        """Drawn numbers in ``[0, 1)``, where the circles of a run begin; float [count]."""
        bounds = np.full(count, 2**31)
        return keyed_draws(np.arange(count), bounds, f"{self._key}/{name}/{self._seed}") / 2**31

    def _epoch(self, epoch: int) -> tuple[Order, np.ndarray, np.ndarray]:
        """The order of an epoch, the quotas in it, and where the documents end."""
        if epoch not in self._epochs:
            order = epoch_order(self.config, self.size, self._key, epoch, self._table)
            quotas = self.quotas
            if quotas.dtype.kind == "f":
                quotas = turning_quotas(quotas, (self._first_turn + epoch * _GOLDEN) % 1.0)
            # Neighbouring epochs are read together, older ones no more.
            kept = dict(list(self._epochs.items())[-1:])
            self._epochs = {**kept, epoch: (order, quotas, quotas.cumsum())}
        return self._epochs[epoch]

    def _jitter(self, epochs: np.ndarray, examples: np.ndarray, room: np.ndarray) -> np.ndarray:
        """Places to the left, in ``[0, min(offset_jitter, room)]``."""
        bounds = np.minimum(self.config.offset_jitter, room) + 1
        if self.config.jitter_mode == "uniform":
            numbers = epochs * self.size + examples
            return keyed_draws(numbers, bounds, f"{self._key}/jitter/{self._seed}")
        # Even within an epoch; over epochs an example goes from each place to the next.
        places = (examples * _GOLDEN % 1.0 * bounds).astype(np.int64)
        return (places + epochs) % bounds


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
