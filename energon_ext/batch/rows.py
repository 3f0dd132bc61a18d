# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""A packed sequence before it is written, and where the parts of many of them lie in a batch."""

from dataclasses import dataclass
from typing import Sequence

import numpy as np

from energon_ext.errors import SampleError


@dataclass(slots=True)
class Row:
    """One packed sequence of ``T`` positions from one source, cut from up to ``T + 1`` tokens.

    A slice of n tokens takes n positions and is one segment. Only a token at index T of the row
    takes no position: it is the label of the last one. Gaps, and what is left at the end, are
    padding.

    Attributes:
        slices: the tokens of each segment in order, integer arrays of any width, none empty.
        source: key of the source.
        slice_sources: key of each slice, where they differ; each then counts as a document. A row
            of no slices, and so of no sources, is padding.
        documents: documents that end in this row.
        label_weights: per slice, float [len(slice)] or None for ones: how much predicting each of
            its tokens counts. None for ones everywhere.
        first_positions: position id of the first token of each slice; None for 0.
        gaps: padding positions before each slice; None for 0.
        log_probs: per slice, float [len(slice)], log-probability of each of its tokens; or None.
        rewards: per slice, or None.
        num_tokens: positions that hold a document; by default the length of all slices, which is
            one too many where the last token is a label alone.

    Example:
        >>> row = Row([np.array([5, 6, 7]), np.array([8, 9])], source="web")
        >>> from energon_ext.batch.collate import BatchAssembler
        >>> batch = BatchAssembler(seq_len=6)([row], sources=["web"])
        >>> batch.tokens.tolist(), batch.labels.tolist()
        ([5, 6, 7, 8, 9, 0], [6, 7, 8, 9, 0, 0])
        >>> batch.token_weights.tolist(), batch.cu_seqlens.tolist()
        ([1.0, 1.0, 0.0, 1.0, 0.0, 0.0], [0, 3, 5, 6])
    """

    slices: list[np.ndarray]
    source: str = ""
    documents: int = 0
    label_weights: Sequence[np.ndarray | None] | None = None
    first_positions: Sequence[int] | None = None
    gaps: Sequence[int] | None = None
    log_probs: Sequence[np.ndarray] | None = None
    rewards: Sequence[float] | None = None
    slice_sources: Sequence[str] | None = None
    num_tokens: int = -1

    def __post_init__(self) -> None:
        if self.num_tokens < 0:
            self.num_tokens = sum(map(len, self.slices))


class RowLayout:
    """Where slices and padding lie, row after row, from lengths and gaps alone.

    A batch has some fifty slices: lists of them are faster than arrays.
    """

    def __init__(self, seq_len: int, alignment: int):
        self._seq_len = seq_len
        self._alignment = alignment
        self.num_rows = 0
        self.slices: list[np.ndarray] = []
        #: ``(first, last + 1, padding)``: slices one after another, and then so much padding
        self.runs: list[tuple[int, int, int]] = []
        self.lengths: list[int] = []  # of each segment, padding included
        self.sources: list[int] = []  # of each segment, -1 for padding
        self.label_alone: set[int] = set()  # slices that are only the label of a last position
        self.full_rows: list[int] = []  # last positions of rows whose label is of the same slice
        self.before_padding: list[int] = []  # positions whose label is padding
        self.padding: list[tuple[int, int]] = []  # (start, stop) of each stretch
        self.aligned_ends: list[int] = []  # of segments with the padding that aligns them

    def add(self, row: Row, sources: list[int]) -> None:
        """Lay out one more row; ``sources`` of its slices."""
        base = self.num_rows * self._seq_len
        lengths = list(map(len, row.slices))
        if 0 in lengths:
            raise SampleError("A row has an empty slice; leave it out.")
        if self._alignment > 1 or row.gaps is not None:
            end = self._add_with_gaps(lengths, row.gaps, sources, base)
        else:
            end = self._add_slices(lengths, sources, 0)
        self.num_rows += 1
        self.slices += row.slices
        least = 1 if lengths or row.slice_sources is None else 0
        if not least <= end <= self._seq_len + 1:
            raise SampleError(
                f"A row has {end} tokens and gaps; {self._seq_len} positions hold 1 to "
                f"{self._seq_len + 1}."
            )
        if end <= self._seq_len:
            self._pad(base, end, self._seq_len + 1 - end)
        elif len(self.slices) - 1 not in self.label_alone:
            self.full_rows.append(base + self._seq_len - 1)

    def _add_slices(self, lengths: list[int], sources: list[int], begin: int) -> int:
        """One slice after another from a place in the row on; returns where the last one ends."""
        first = self.runs[-1][1] if self.runs else 0
        self.runs.append((first, first + len(lengths), 0))
        end = begin + sum(lengths)
        if end > self._seq_len:
            lengths[-1] -= 1
            if not lengths[-1]:
                lengths.pop()
                self.label_alone.add(self.runs[-1][1] - 1)
        self.lengths += lengths
        self.sources += sources[: len(lengths)]
        return end

    def _add_with_gaps(
        self, lengths: list[int], gaps: Sequence[int] | None, sources: list[int], base: int
    ) -> int:
        """Padding where the row asks for it, and as much as aligns the next slice."""
        seq_len, alignment = self._seq_len, self._alignment
        end = 0
        for length, gap, source in zip(lengths, gaps or [0] * len(lengths), sources):
            gap += -(end + gap) % alignment
            if gap:
                self._pad(base, end, gap)
            end += gap
            if alignment > 1 and 0 < end < seq_len:
                self.aligned_ends.append(base + end)
            end = self._add_slices([length], [source], end)
        if alignment > 1:
            aligned_end = end + -end % alignment
            self.aligned_ends += [base + aligned_end] if 0 < aligned_end < seq_len else []
            self.aligned_ends.append(base + seq_len)
        return end

    def _pad(self, base: int, end: int, length: int) -> None:
        first = self.runs[-1][1] if self.runs else 0
        self.runs.append((first, first, length))
        if end:
            self.before_padding.append(base + end - 1)
        positions = min(length, self._seq_len - end)
        if positions:
            self.lengths.append(positions)
            self.sources.append(-1)
            self.padding.append((base + end, base + end + positions))

    def fill(self, slices: Sequence[np.ndarray], padding: np.ndarray) -> list[np.ndarray]:
        """What fills the T + 1 places of all rows: something for each slice, padding between."""
        filled: list[np.ndarray] = []
        for first, stop, length in self.runs:
            filled += slices[first:stop]
            if length:
                filled.append(padding[:length])
        return filled

    def segments_of_slices(self) -> list[tuple[int, int]]:
        """``(segment, slice)`` for each slice that takes positions."""
        segments = [segment for segment, source in enumerate(self.sources) if source >= 0]
        kept = [index for index in range(len(self.slices)) if index not in self.label_alone]
        return list(zip(segments, kept))
