# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""From the number of an example to its document, start and offset."""

from typing import Sequence

import numpy as np

from energon_ext.documents.permutation import keyed_draws
from energon_ext.errors import ConfigError
from energon_ext.splice.config import MultiSpliceConfig, SpliceFields
from energon_ext.splice.order import Order, epoch_order
from energon_ext.splice.pairs import Contents, PairTable
from energon_ext.splice.quotas import document_quotas
from energon_ext.splice.starts import EdgeWeights, check_exact, quantile_numbers, quantiles

#: 2^64 divided by the golden ratio, and the fraction of the square root of 2: steps that fill a
#: circle evenly at any number of steps.
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_SQUARE_ROOT_OF_2 = 0x6A09E667F3BCC909


class SpliceIndex:
    """Every example of every epoch, by number, in memory that depends on the documents alone.

    Example ``n`` is the ``n % size``-th of epoch ``n // size``. The order of an epoch is a keyed
    bijection, so worker w of W takes the numbers ``w, w + W, w + 2 W, ...``: workers never share
    an example of an epoch, together they cover it, and all that one has to remember is how many it
    took.

    Args:
        doc_lengths: tokens of each document.
        seq_len: S, positions of a frame.
        config: of one document or many.
        key: of the source and the run's seed; names the orders.

    Attributes:
        quotas: int64 [documents], examples in an epoch.
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
        self.pairs = self._table.totals
        if not self.pairs.any():
            raise ConfigError(
                f"No document has a pair: the longest has {int(self.doc_lengths.max(initial=0))} "
                f"tokens; content_length {config.content_length}, min_copy_len "
                f"{config.min_copy_len} and mode {config.mode} with seq_len {seq_len} need more."
            )
        self.quotas = _quotas(self.doc_lengths, self.pairs, config)
        check_exact(self.pairs, self.quotas)
        self.size = int(self.quotas.sum())
        self._tokens = self.quotas * (self._table.tokens / np.maximum(self.pairs, 1))
        self._ends = np.cumsum(self.quotas)
        self._edges = None
        if config.alpha:
            content = min(config.content_length or seq_len, seq_len)
            self._edges = EdgeWeights(content, config.content_stride, config.alpha)
        self._orders: dict[int, Order] = {}

    def locate(self, numbers: np.ndarray) -> Contents:
        """Find examples by number.

        Args:
            numbers: int64 [n], >= 0; any order, any epochs.
        """
        numbers = np.asarray(numbers, np.int64)
        epochs = numbers // self.size
        examples = numbers - epochs * self.size
        for epoch in np.unique(epochs).tolist():
            now = epochs == epoch
            examples[now] = self._order_of(epoch)(examples[now])
        documents = np.searchsorted(self._ends, examples, side="right")
        quotas, pairs = self.quotas[documents], self.pairs[documents]
        own = examples - (self._ends[documents] - quotas)
        chosen = quantile_numbers(pairs, quotas, own)
        if self._edges is not None:
            last_starts = (self.doc_lengths - self._table.copy_lens)[documents]
            # A document with one content has one start, and is not of the length of the table.
            several = last_starts > 0
            chosen[several] = self._edges.rows(
                last_starts[several], quantiles(quotas, own)[several]
            )
        contents = self._table.locate(documents, chosen)
        if self.config.offset_jitter:
            room = contents.offsets
            contents = contents._replace(offsets=room - self._jitter(epochs, examples, room))
        return contents

    def token_shares(self) -> np.ndarray:
        """Expected share of each document in all tokens, edge weights left out; float [docs]."""
        return self._tokens / self._tokens.sum()

    def coverage(self) -> np.ndarray:
        """How often an epoch shows a token of each document, on average; float [docs]."""
        return self._tokens / self.doc_lengths

    def _order_of(self, epoch: int) -> Order:
        if epoch not in self._orders:
            order = epoch_order(self.config, self.size, self._key, epoch, self._table)
            # Neighbouring epochs are read together, older ones no more.
            self._orders = {**dict(list(self._orders.items())[-1:]), epoch: order}
        return self._orders[epoch]

    def _jitter(self, epochs: np.ndarray, examples: np.ndarray, room: np.ndarray) -> np.ndarray:
        """Places to the left, in ``[0, min(offset_jitter, room)]``."""
        bounds = np.minimum(self.config.offset_jitter, room) + 1
        steps = np.empty_like(bounds)
        seed = f"{self._key}/jitter/{getattr(self.config, 'seed', 0)}"
        for epoch in np.unique(epochs).tolist():
            now = epochs == epoch
            if self.config.jitter_mode == "uniform":
                steps[now] = keyed_draws(examples[now], bounds[now], f"{seed}/{epoch}")
            else:
                angles = examples[now].astype(np.uint64) * _GOLDEN
                angles += np.uint64(epoch * _SQUARE_ROOT_OF_2 % 2**64)
                half = np.uint64(32)
                steps[now] = (angles >> half) * bounds[now].astype(np.uint64) >> half
        return steps


def _quotas(lengths: np.ndarray, pairs: np.ndarray, config: SpliceFields) -> np.ndarray:
    if not isinstance(config, MultiSpliceConfig):
        return pairs
    present, weights = pairs > 0, config.doc_weights
    whole = np.where(present, pairs.max(), 0) if config.balance_mode == "by_document" else pairs
    is_plain = config.epoch_length is None and weights is None
    if is_plain and config.balance_mode != "by_temperature":
        return whole
    if weights is not None and len(weights) != len(lengths):
        raise ConfigError(
            f"doc_weights: {len(weights)} found for {len(lengths)} documents; one for each is "
            f"needed, in the order of choice."
        )
    quotas = np.zeros_like(pairs)
    quotas[present] = document_quotas(
        lengths[present],
        config.epoch_length or int(whole.sum()),
        config.balance_mode,
        config.balance_tau,
        None if weights is None else np.asarray(weights)[present],
    )
    return quotas
