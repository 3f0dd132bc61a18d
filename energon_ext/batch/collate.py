# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Rows into a batch.

Every row becomes a stream of T + 1 tokens: its slices one after another, padding between and behind
them. The first T are the model's input, the last T its labels. Weights and log-probabilities are
streams too, of which the last T are kept: they belong to the labels.
"""

from dataclasses import dataclass, field
from typing import Sequence

import numpy as np
import torch

from energon_ext.batch.packed_batch import PackedBatch
from energon_ext.batch.rows import Row
from energon_ext.errors import ConfigError, SampleError


@dataclass(kw_only=True, eq=False)
class BatchAssembler:
    """Writes rows of one length into a :class:`~energon_ext.PackedBatch`.

    Args:
        seq_len: T, positions of a row.
        pad_id: token on positions that hold no document.
        mask_boundary_loss: weight 0 where input and label are of different segments. Without
            it the last token of a segment is trained on the first of the next one, if that follows
            without a gap.
        masked_label: weight 0 where the label is this id; None to mask none.
        alignment: every segment begins at a multiple of this many positions. Above 1 the batch gets
            ``cu_seqlens_padded``. Context parallelism needs ``2 * context_parallel_size``.

    Raises:
        ConfigError: the row length is not a multiple of the alignment.
    """

    seq_len: int = field(kw_only=False)
    pad_id: int = 0
    mask_boundary_loss: bool = True
    masked_label: int | None = None
    alignment: int = 1

    def __post_init__(self) -> None:
        if self.alignment < 1 or self.seq_len % self.alignment:
            raise ConfigError(
                f"alignment: {self.alignment!r} found; the sequence length {self.seq_len} must be "
                f"a multiple of it."
            )

    def __call__(self, rows: Sequence[Row], sources: Sequence[str]) -> PackedBatch:
        """Assemble a batch.

        Args:
            rows: at least one.
            sources: every key a row may name; fixes the meaning of ``source_ids``.

        Raises:
            SampleError: no rows, an empty row or slice, a row of more than T + 1 tokens and gaps,
                of a source that is not in ``sources``, or only some with rewards or with
                log-probabilities.
        """
        if not rows:
            raise SampleError("A PackedBatch needs at least one row, got none.")
        shape = len(rows), self.seq_len + 1
        tokens = np.full(shape, self.pad_id, np.int64)
        weights = np.ones(shape, np.float32)
        has_log_probs, has_rewards = _have(rows, "log_probs"), _have(rows, "rewards")
        log_probs = np.zeros(shape, np.float32) if has_log_probs else None
        segments = _Segments(sources)
        for number, row in enumerate(rows):
            starts = self._write(row, tokens[number], weights[number], segments)
            if log_probs is not None:
                for start, values in zip(starts, row.log_probs or ()):
                    log_probs[number, start : start + len(values)] = values
        labels, token_weights = _at_labels(tokens), _at_labels(weights)
        if self.masked_label is not None:
            token_weights[labels == self.masked_label] = 0.0
        lengths = np.array(segments.lengths)
        ends = lengths.cumsum()
        first_places = ends - lengths - segments.first_positions
        return PackedBatch(
            tokens=torch.from_numpy(tokens[:, :-1].flatten()),
            labels=labels,
            token_weights=token_weights,
            position_ids=torch.from_numpy(np.arange(ends[-1]) - np.repeat(first_places, lengths)),
            cu_seqlens=_int32([0, *ends.tolist()]),
            max_seqlen=int(lengths.max()),
            source_ids=_int32(segments.sources),
            sources=tuple(sources),
            source_documents=_int32(segments.documents),
            cu_seqlens_padded=_int32(segments.aligned_ends) if self.alignment > 1 else None,
            log_probs=None if log_probs is None else _at_labels(log_probs),
            rewards=torch.tensor(segments.rewards).float() if has_rewards else None,
        )

    def _write(
        self, row: Row, tokens: np.ndarray, weights: np.ndarray, segments: "_Segments"
    ) -> list[int]:
        """Write the streams of a row, name its segments; returns where each slice begins."""
        parts, starts, masked, end = [], [], [], 0
        sources = segments.sources_of(row)
        for index, content in enumerate(row.slices):
            if not len(content):
                raise SampleError("A row has an empty slice; leave it out.")
            start = end + (row.gaps[index] if row.gaps is not None else 0)
            start += -start % self.alignment
            if start > end:
                parts.append(tokens[end:start])
                weights[end:start] = 0.0
                segments.append(min(start, self.seq_len) - end, -1)
            if start > end or self.mask_boundary_loss:
                masked.append(start)
            end = start + len(content)
            parts.append(content)
            starts.append(start)
            first = row.first_positions[index] if row.first_positions is not None else 0
            reward = row.rewards[index] if row.rewards is not None else 0.0
            # One position less where the last token is a label alone.
            segments.append(min(end, self.seq_len) - start, sources[index], first, reward)
        is_empty = not starts and row.slice_sources is None
        if is_empty or end > self.seq_len + 1:
            raise SampleError(
                f"A row has {end} tokens and gaps; {self.seq_len} positions hold 1 to "
                f"{self.seq_len + 1}."
            )
        if parts:
            np.concatenate(parts, out=tokens[:end], casting="unsafe")
        weights[end:] = 0.0
        for start, own in zip(starts, row.label_weights or ()):
            if own is not None:
                weights[start : start + len(own)] = own
        weights[masked] = 0.0
        segments.append(self.seq_len - end, -1)
        if self.alignment > 1:
            segments.align({*starts, end + -end % self.alignment}, self.seq_len)
        return starts


class _Segments:
    """Segments of a batch, as lists: faster than arrays for about fifty entries."""

    def __init__(self, sources: Sequence[str]):
        self.lengths: list[int] = []
        self.sources: list[int] = []  # -1 for padding
        self.first_positions: list[int] = []
        self.rewards: list[float] = []
        self.aligned_ends: list[int] = [0]  # each with the padding that aligns the next one
        self.documents = [0] * len(sources)  # of each source
        self._index_of = {key: index for index, key in enumerate(sources)}

    def append(self, length: int, source: int, first: int = 0, reward: float = 0.0) -> None:
        """One more segment, unless it has no positions."""
        if length > 0:
            self.lengths.append(length)
            self.sources.append(source)
            self.first_positions.append(first)
            self.rewards.append(reward)

    def align(self, places: set[int], seq_len: int) -> None:
        """The places of one more row at which an aligned segment begins or ends."""
        base = self.aligned_ends[-1]
        inside = sorted(place for place in places if 0 < place < seq_len)
        self.aligned_ends += [base + place for place in (*inside, seq_len)]

    def sources_of(self, row: Row) -> list[int]:
        """The source of each slice; counts the documents of the row."""
        try:
            if row.slice_sources is None:
                index = self._index_of[row.source]
                self.documents[index] += row.documents
                return [index] * len(row.slices)
            indices = [self._index_of[key] for key in row.slice_sources]
        except KeyError as error:
            raise SampleError(
                f"Row of source {error}, but the batch has {list(self._index_of)}."
            ) from None
        for index in indices:
            self.documents[index] += 1
        return indices


def _have(rows: Sequence[Row], name: str) -> bool:
    """Check for an optional field in the rows; rows of padding do not count."""
    found = {getattr(row, name) is not None for row in rows if row.slices}
    if len(found) > 1:
        raise SampleError(f"Some rows of a batch have {name}, some do not; give all or none.")
    return found == {True}


def _at_labels(stream: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(stream[:, 1:].flatten())


def _int32(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)
