# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""A fixed grid of starts and offsets, and the loss on each point of it."""

from collections.abc import Container, Iterator, Sequence

import numpy as np

from energon_ext.arguments import check_integers
from energon_ext.batch.packed_batch import PackedBatch
from energon_ext.errors import ConfigError
from energon_ext.splice.config import SpliceFields
from energon_ext.splice.pairs import Contents, PairTable

_GOLDEN = (np.sqrt(5) - 1) / 2


class GridIndex:
    """The same few contents of every document, evenly spread over its starts and offsets.

    So are any first ones of them, for an evaluation that shows a part of them.

    Args:
        doc_lengths: tokens of each document.
        seq_len: S, positions of a frame.
        starts: the most different ones; the first and the last are among them.
        offsets: likewise, at each start; those that training uses or not.

    Attributes:
        size: examples.
        quotas: int64 [documents], examples of each.

    Example:
        >>> from energon_ext.splice import SpliceConfig
        >>> grid = GridIndex([10], 12, SpliceConfig(content_length=4), starts=2, offsets=3)
        >>> contents = grid.locate(np.arange(grid.size))
        >>> list(zip(contents.starts.tolist(), contents.offsets.tolist()))
        [(0, 0), (8, 10), (0, 8), (8, 5), (0, 4), (8, 0)]
    """

    def __init__(
        self,
        doc_lengths: Sequence[int] | np.ndarray,
        seq_len: int,
        config: SpliceFields,
        *,
        starts: int = 4,
        offsets: int = 8,
    ):
        check_integers("GridIndex", starts=starts, offsets=offsets)
        self.doc_lengths = np.asarray(doc_lengths, np.int64)
        table = PairTable(self.doc_lengths, seq_len, config)
        table.require_pairs()
        points: list[tuple[int, int, int, int]] = []
        for document in np.flatnonzero(table.totals).tolist():
            counts = table.row_counts(document)
            firsts = (counts.cumsum() - counts)[_spread(len(counts) - 1, starts)]
            places = table.locate(np.full_like(firsts, document), firsts)
            for start, copy_len in zip(places.starts.tolist(), places.copy_lens.tolist()):
                last = seq_len - (config.min_copy_len if config.cut_at_frame_end else copy_len)
                for offset in _spread(last, offsets):
                    points.append((document, start, offset, min(copy_len, seq_len - offset)))
        self._points = _spread_out(np.array(points, np.int64))
        self.size = len(points)
        documents, copy_lens = self._points[:, 0], self._points[:, 3]
        self.quotas = np.bincount(documents, minlength=len(self.doc_lengths))
        self._tokens = np.bincount(documents, copy_lens, minlength=len(self.doc_lengths))

    def locate(self, numbers: np.ndarray) -> Contents:
        """The contents of some numbers below ``size``."""
        return Contents(*self._points[numbers].T)

    def token_shares(self) -> np.ndarray:
        """Share of each document in all tokens; float [documents]."""
        return self._tokens / self._tokens.sum()


def _spread_out(points: np.ndarray) -> np.ndarray:
    """Points in an order of which any first ones are spread over all documents and their points.

    Multiples of the golden ratio fill [0, 1) evenly, however many are taken.
    """
    documents = points[:, 0]
    number = np.arange(len(points)) - np.searchsorted(documents, documents)
    return points[np.argsort(number * _GOLDEN % 1.0, kind="stable")]


class LossMap:
    """The mean loss of every content of a validation grid, and how likely it is as a whole.

    P(z) is the probability that a model which is given the first tokens of a content goes on with
    its other ones, word for word: the exponential of the sum of their log-probabilities.

    Args:
        grid: what the validation source shows.
        names: of the documents, as batches call them.
        prompt_tokens: that P(z) takes as given, at least 1.

    Attributes:
        losses: float [grid.size], NaN where nothing was shown yet.
        log_probabilities: likewise, the logarithm of P(z); 0 for a content that is all prompt.
    """

    def __init__(self, grid: GridIndex, names: Sequence[str], *, prompt_tokens: int = 1):
        check_integers("LossMap", prompt_tokens=prompt_tokens)
        self._prompt_tokens = prompt_tokens
        self.log_probabilities = np.full(grid.size, np.nan)
        self.contents = grid.locate(np.arange(grid.size))
        self.names = list(names)
        self.losses = np.full(grid.size, np.nan)
        self._next = 0

    def add_batch(self, batch: PackedBatch, token_losses: np.ndarray) -> None:
        """Add the next batch of the validation dataset.

        Args:
            batch: in the order that the dataset yields to one rank alone.
            token_losses: float [N], cross-entropy at each position.

        Raises:
            ConfigError: the next content of the grid is another, as some are on other ranks.
        """
        weights, positions = batch.token_weights.numpy(), batch.position_ids.numpy()
        for name, trained in contents_of(batch, self.names):
            if trained.size:
                self._check_next(name, int(positions[trained[0]]))
            weight = weights[trained]
            self.losses[self._next] = (weight * token_losses[trained]).sum() / weight.sum()
            predicted = trained[self._prompt_tokens - 1 :]
            self.log_probabilities[self._next] = -token_losses[predicted].sum()
            self._next += 1

    def per_document(self) -> dict[str, float]:
        """Mean loss of each document, or of all without own names, over what was shown."""
        return self._means(self.losses)

    def memorized(self) -> dict[str, float]:
        """Mean P(z) of each document, or of all without own names, over what was shown."""
        return self._means(np.exp(self.log_probabilities))

    def _check_next(self, name: str, offset: int) -> None:
        number, contents = self._next, self.contents
        if number >= len(contents.offsets) or (name, offset) != (
            self.names[contents.documents[number]],
            contents.offsets[number],
        ):
            raise ConfigError(
                f"LossMap: {name} at offset {offset} found as content {number}, not the one of the "
                f"grid; build the validation dataset with rank=0, world_size=1 and num_workers=0."
            )

    def _means(self, values: np.ndarray) -> dict[str, float]:
        means, names = {}, np.array(self.names)[self.contents.documents]
        for name in dict.fromkeys(self.names):
            own = values[names == name]
            if np.isfinite(own).any():
                means[name] = float(np.nanmean(own))
        return means

    def of(self, document: int) -> tuple[list[int], list[int], np.ndarray]:
        """Starts, offsets, and the losses on them, float [starts, offsets]."""
        own = self.contents.documents == document
        starts, rows = np.unique(self.contents.starts[own], return_inverse=True)
        offsets, columns = np.unique(self.contents.offsets[own], return_inverse=True)
        losses = np.full((len(starts), len(offsets)), np.nan)
        losses[rows, columns] = self.losses[own]
        return starts.tolist(), offsets.tolist(), losses


def contents_of(batch: PackedBatch, names: Container[str]) -> Iterator[tuple[str, np.ndarray]]:
    """The document of each content in a batch, and its positions that are trained.

    The first of them predicts the second token of the content.

    Args:
        names: of the spliced documents; other segments are left out.
    """
    weights, ends = batch.token_weights.numpy(), batch.cu_seqlens.tolist()
    for start, end, source in zip(ends, ends[1:], batch.source_ids.tolist()):
        if source >= 0 and batch.sources[source] in names:
            yield batch.sources[source], start + np.flatnonzero(weights[start:end])


def _spread(last: int, count: int) -> list[int]:
    """At most ``count`` integers from 0 to ``last``, evenly, both included."""
    return sorted({round(last * step / max(1, count - 1)) for step in range(count)})
