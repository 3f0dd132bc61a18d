# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""A fixed grid of starts and offsets, and the loss at each of its points."""

from collections.abc import Container, Iterator, Sequence

import numpy as np

from energon_ext.arguments import check_integers
from energon_ext.batch.packed_batch import PackedBatch
from energon_ext.errors import ConfigError
from energon_ext.splice.config import SpliceFields
from energon_ext.splice.pairs import Contents, PairTable
from energon_ext.splice.starts import GOLDEN


class GridIndex:
    """A few fixed contents of every document, evenly spread over its starts and offsets.

    Any first N of them are evenly spread too, for an evaluation that only shows a part.

    Args:
        doc_lengths: tokens of each document.
        seq_len: S, positions per frame.
        starts: maximum number of starts; the first and the last one are included.
        offsets: maximum number of offsets at each start, whether training uses them or not.

    Attributes:
        size: examples.
        quotas: int64 [documents], examples of each document.

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
        rows: list[tuple[int, int, int, int]] = []
        for document in np.flatnonzero(table.totals).tolist():
            counts = table.row_counts(document)
            firsts = (counts.cumsum() - counts)[_spread(len(counts) - 1, starts)]
            places = table.locate(np.full_like(firsts, document), firsts)
            for start, copy_len in zip(places.starts.tolist(), places.copy_lens.tolist()):
                last = seq_len - (config.min_copy_len if config.cut_at_frame_end else copy_len)
                for offset in _spread(last, offsets):
                    rows.append((document, start, offset, min(copy_len, seq_len - offset)))
        points = np.array(rows, np.int64)
        self.size = len(points)
        documents, copy_lens = points[:, 0], points[:, 3]
        self.quotas = np.bincount(documents, minlength=len(self.doc_lengths))
        self._tokens = np.bincount(documents, copy_lens, minlength=len(self.doc_lengths))
        numbers = np.arange(self.size) - np.searchsorted(documents, documents)
        self._points = points[np.argsort(numbers * GOLDEN % 1.0, kind="stable")]

    def locate(self, numbers: np.ndarray) -> Contents:
        """Return contents by number, each below ``size``."""
        return Contents(*self._points[numbers].T)

    def token_shares(self) -> np.ndarray:
        """Return the share of each document in all tokens, float [documents]."""
        return self._tokens / self._tokens.sum()


class LossMap:
    """The mean loss of every content of a validation grid, and its probability as a whole.

    P(z) is the probability that a model, given the first tokens of a content, continues with
    exactly the rest: the exponential of the sum of their log-probabilities.

    Args:
        grid: the examples of the validation source.
        names: names of the documents in batches.
        prompt_tokens: number of tokens given to the model for P(z), at least 1.

    Attributes:
        losses: float [grid.size], NaN for contents that were not shown yet.
        log_probabilities: the same for the logarithm of P(z); 0 for a content that is all prompt.
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
            batch: the next batch of a dataset that is read by a single rank.
            token_losses: float [N], cross-entropy at each position.

        Raises:
            ConfigError: the batch does not continue the grid, for example on one of several ranks.
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
        """Return the mean loss of each document name over the contents shown so far."""
        return self._means(self.losses)

    def memorized(self) -> dict[str, float]:
        """Return the mean P(z) of each document name over the contents shown so far."""
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
            selected = values[names == name]
            if np.isfinite(selected).any():
                means[name] = float(np.nanmean(selected))
        return means

    def of(self, document: int) -> tuple[list[int], list[int], np.ndarray]:
        """Return the starts and offsets of a document, and its losses, float [starts, offsets]."""
        selected = self.contents.documents == document
        starts, rows = np.unique(self.contents.starts[selected], return_inverse=True)
        offsets, columns = np.unique(self.contents.offsets[selected], return_inverse=True)
        losses = np.full((len(starts), len(offsets)), np.nan)
        losses[rows, columns] = self.losses[selected]
        return starts.tolist(), offsets.tolist(), losses


def contents_of(batch: PackedBatch, names: Container[str]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the document of each content in a batch, and the content's trained positions.

    The first position predicts the second token of the content.

    Args:
        names: names of the spliced documents; other segments are ignored.
    """
    weights, ends = batch.token_weights.numpy(), batch.cu_seqlens.tolist()
    for start, end, source in zip(ends, ends[1:], batch.source_ids.tolist()):
        if source >= 0 and batch.sources[source] in names:
            yield batch.sources[source], start + np.flatnonzero(weights[start:end])


def _spread(last: int, count: int) -> list[int]:
    """Return at most ``count`` integers, evenly spaced from 0 to ``last`` inclusive."""
    return sorted({round(last * step / max(1, count - 1)) for step in range(count)})
