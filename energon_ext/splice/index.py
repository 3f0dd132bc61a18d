# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""From the number of an example to its document, start and offset."""

from typing import Callable, Sequence

import numpy as np

from energon_ext.documents.permutation import keyed_draws
from energon_ext.errors import ConfigError
from energon_ext.splice.config import MultiSpliceConfig, SpliceFields
from energon_ext.splice.order import Order, epoch_order
from energon_ext.splice.pairs import Contents, PairTable, longest_content
from energon_ext.splice.quotas import TurningQuotas
from energon_ext.splice.starts import EdgeWeights, Phases, check_exact, quantile_numbers

#: Phases for each unit of edge weight.
_FINE = 2**10

#: Names how an example is found from its number; states of another are refused.
ORDER = "phases"

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
        self.pairs = self._table.totals
        self.quotas, self._turning = self._divide_epoch()
        check_exact(self.pairs, self.quotas)
        self.size = int(round(self.quotas.sum()))
        self._tokens = self.quotas * (self._table.tokens / np.maximum(self.pairs, 1))
        self._edges = None
        wholes, least = np.maximum(self.pairs, 1), np.maximum(self.quotas.astype(np.int64), 1)
        if config.alpha:
            content = longest_content(seq_len, config)
            self._edges = EdgeWeights(content, config.content_stride, config.alpha)
            # A start weighs at least 1, so quantiles of as many phases as all weigh find it.
            wholes = np.ceil(self._edges.totals(self._last_starts())).astype(np.int64) * _FINE
            least = least * _FINE
        self._wholes, self._phases = wholes, Phases(wholes, least, f"{key}/phases/{self._seed}")
        self._epochs: dict[int, tuple[Order, np.ndarray, np.ndarray]] = {}

    def locate(self, numbers: np.ndarray) -> Contents:
        """Find examples by number.

        Args:
            numbers: int64 [n], >= 0; any order, any epochs.
        """
        numbers = np.asarray(numbers, np.int64)
        epochs = numbers // self.size
        examples = numbers - epochs * self.size
        documents, quotas, own = (np.empty_like(numbers) for _ in range(3))
        for epoch in np.unique(epochs).tolist():
            now = epochs == epoch
            order, of_epoch, ends = self._epoch(epoch)
            examples[now] = order(examples[now])
            documents[now] = found = np.searchsorted(ends, examples[now], side="right")
            quotas[now] = of_epoch[found]
            own[now] = examples[now] - (ends[found] - of_epoch[found])
        phases = self._phases.of(documents, epochs)
        if self._edges is None:
            chosen = quantile_numbers(self.pairs[documents], quotas, own, phases)
        else:
            # A document with one content has one start, and is not of the length of the table.
            chosen, last_starts = np.zeros_like(own), self._last_starts()[documents]
            several = last_starts > 0
            fractions = (own + (phases + 0.5) / self._wholes[documents]) / quotas
            chosen[several] = self._edges.rows(last_starts[several], fractions[several])
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
            >>> index = SpliceIndex([6], 4, MultiSpliceConfig(content_length=4, alpha=1.0))
            >>> (index.views(0) * 10).round().tolist()  # weights 4, 2, 4 of 3 examples
            [12.0, 18.0, 30.0, 30.0, 18.0, 12.0]
        """
        if self.config.mode == "slide" or self.config.content_start_mode != "coverage_balanced":
            raise ConfigError("views: of coverage_balanced alone; coverage() is of every mode.")
        content = int(self._table.copy_lens[document])
        last_start = int(self.doc_lengths[document]) - content
        weights = np.ones(int(self._table.rows[document]))
        if self._edges is not None and last_start > 0:
            weights = self._edges.of(last_start)
        starts = np.arange(len(weights)) * self.config.content_stride
        changes = np.zeros(int(self.doc_lengths[document]) + 1)
        changes[starts] += weights
        changes[starts + content] -= weights
        return changes.cumsum()[:-1] * (self.quotas[document] / max(1, weights.sum()))

    def describe(self, document: int) -> str:
        """What an epoch shows of a document, for the log."""
        offsets = self._table.row_counts(document)
        text = (
            f"{self.doc_lengths[document]} tokens, {len(offsets)} starts, up to "
            f"{offsets.max(initial=0) + self.config.offset_jitter} offsets, "
            f"{self.pairs[document]} pairs, "
            f"{self.quotas[document]:g} examples ({self.quotas[document] / self.size:.4f} of all), "
            f"share of tokens {self.token_shares()[document]:.4f}, each token "
            f"{self.coverage()[document]:.2f} times"
        )
        if self.config.alpha:
            views = self.views(document)
            text += f" ({views.min():.2f} to {views.max():.2f})"
        return text

    @property
    def _seed(self) -> int:
        return getattr(self.config, "seed", 0)

    def _last_starts(self) -> np.ndarray:
        """Of each document, in ``coverage_balanced``; 0 where it has no pair."""
        return np.maximum(self.doc_lengths - self._table.copy_lens, 0)

    def _epoch(self, epoch: int) -> tuple[Order, np.ndarray, np.ndarray]:
        """The order of an epoch, the quotas in it, and where the documents end."""
        if epoch not in self._epochs:
            order = epoch_order(self.config, self.size, self._key, epoch, self._table)
            quotas = self.quotas if self._turning is None else self._turning(epoch)
            # Neighbouring epochs are read together, older ones no more.
            kept = dict(list(self._epochs.items())[-1:])
            self._epochs = {**kept, epoch: (order, quotas, quotas.cumsum())}
        return self._epochs[epoch]

    def _jitter(self, epochs: np.ndarray, examples: np.ndarray, room: np.ndarray) -> np.ndarray:
        """Places to the left, in ``[0, min(offset_jitter, room)]``."""
        bounds = np.minimum(self.config.offset_jitter, room) + 1
        steps = np.empty_like(bounds)
        seed = f"{self._key}/jitter/{self._seed}"
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

    def _divide_epoch(self) -> tuple[np.ndarray, Callable[[int], np.ndarray] | None]:
        """Examples of each document in an epoch, and those of each epoch where they differ."""
        lengths, pairs, config = self.doc_lengths, self.pairs, self.config
        if not isinstance(config, MultiSpliceConfig):
            return pairs, None
        present, weights = pairs > 0, config.doc_weights
        whole = np.where(present, pairs.max(), 0) if config.balance_mode == "by_document" else pairs
        is_plain = config.epoch_length is None and weights is None
        if is_plain and config.balance_mode != "by_temperature":
            return whole, None
        if weights is not None and len(weights) != len(lengths):
            raise ConfigError(
                f"doc_weights: {len(weights)} found for {len(lengths)} documents; one for each is "
                f"needed, in the order of choice."
            )
        turning = TurningQuotas(
            lengths[present],
            config.epoch_length or int(whole.sum()),
            config.balance_mode,
            config.balance_tau,
            None if weights is None else np.asarray(weights)[present],
            key=f"{self._key}/turns/{self._seed}",
        )

        def placed(own: np.ndarray) -> np.ndarray:
            quotas = np.zeros(len(pairs), own.dtype)
            quotas[present] = own
            return quotas

        if not turning.take_turns:
            return placed(turning.of(0)), None
        return placed(turning.quotas), lambda epoch: placed(turning.of(epoch))
