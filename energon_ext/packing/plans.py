# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Rows planned on arrays: many documents at once, none of them an object.

What :class:`~energon_ext.packing.BinPacker` and :class:`~energon_ext.packing.SequentialPacker` do
to documents that come one by one, for documents that are known by index and length.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, Sequence

import numpy as np

from energon_ext.packing.fill import fill_bins
from energon_ext.packing.packers import DEFAULT_CARRY, bin_sizes, check_bin_options


@dataclass(frozen=True)
class Pieces:
    """Parts of documents, int64 [n] each.

    Attributes:
        documents: index of each.
        starts, stops: tokens ``[start, stop)`` of the document.
        lengths: of the whole document.
    """

    documents: np.ndarray
    starts: np.ndarray
    stops: np.ndarray
    lengths: np.ndarray

    @classmethod
    def none(cls) -> "Pieces":
        nothing = np.zeros(0, np.int64)
        return cls(nothing, nothing, nothing, nothing)

    @classmethod
    def whole(cls, documents: np.ndarray, lengths: np.ndarray) -> "Pieces":
        """All tokens of documents; empty ones are left out."""
        if not lengths.all():
            documents, lengths = documents[lengths > 0], lengths[lengths > 0]
        return cls(documents, np.zeros_like(lengths), lengths, lengths)

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, where: Any) -> "Pieces":
        return Pieces(
            self.documents[where], self.starts[where], self.stops[where], self.lengths[where]
        )

    @classmethod
    def joined(cls, parts: Sequence["Pieces"]) -> "Pieces":
        """All pieces of several, one after another."""
        names = ("documents", "starts", "stops", "lengths")
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))

    def __add__(self, others: "Pieces") -> "Pieces":
        return Pieces.joined((self, others)) if len(self) else others

    def cut(self, longest: int) -> "Pieces":
        """Pieces of at most ``longest`` tokens that share their boundary token."""
        sizes = self.stops - self.starts
        if not len(self) or sizes.max() <= longest:
            return self
        counts = np.maximum(1, -(-(sizes - 1) // (longest - 1)))
        number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        parts = self[np.repeat(np.arange(len(self)), counts)]
        starts = parts.starts + number * (longest - 1)
        stops = np.minimum(starts + longest, parts.stops)
        return Pieces(parts.documents, starts, stops, parts.lengths)


@dataclass(frozen=True)
class PlannedRows:
    """Rows of one planning.

    Attributes:
        pieces: of all rows, row after row.
        ends: where each row ends among them.
        tokens: positions of each row that hold a document.
        documents: how many end in each row.
        rest: what was left for the next planning.
    """

    pieces: Pieces
    ends: list[int]
    tokens: list[int]
    documents: list[int]
    rest: Pieces


class BinPlanner:
    """Documents in full rows; arguments and rule as of :class:`~energon_ext.packing.BinPacker`."""

    def __init__(
        self,
        row_length: int,
        buffer_docs: int,
        max_docs_per_bin: int | None = None,
        *,
        carry: float = DEFAULT_CARRY,
        alignment: int = 1,
    ):
        check_bin_options(buffer_docs, max_docs_per_bin, carry)
        self.row_length = row_length
        self.buffer_docs = buffer_docs
        self.max_docs_per_bin = max_docs_per_bin
        self.carry = carry
        self.alignment = alignment

    def prepare(self, new: Pieces) -> Pieces:
        """New documents as pieces that fit into a row."""
        return new.cut(self.row_length + 1)

    def resume(self, held: Pieces) -> Pieces:
        """Pieces of which documents and starts were saved, with their stops."""
        stops = np.minimum(held.starts + self.row_length + 1, held.lengths)
        return Pieces(held.documents, held.starts, stops, held.lengths)

    def unread(self, rows: PlannedRows, next_row: int, rows_before: int) -> Pieces:
        """The pieces of a planning that are left from row ``next_row`` on."""
        begin = rows.ends[next_row - 1] if next_row else 0
        return rows.pieces[begin:] + rows.rest

    def plan(self, pieces: Pieces, rows_before: int, last: bool) -> PlannedRows:
        """Rows of pieces, the oldest first.

        Args:
            pieces: what was left by the planning before, then new ones.
            rows_before: rows that earlier plannings made; names the order of the new ones.
            last: no more will come; nothing is left over.
        """
        lengths = pieces.stops - pieces.starts
        sizes, capacity = bin_sizes(lengths, self.row_length, self.alignment)
        items, ends = fill_bins(
            sizes,
            capacity,
            keep=0 if last else int(self.carry * len(pieces)),
            max_items_per_bin=self.max_docs_per_bin,
        )
        placed = np.zeros(len(pieces), bool)
        placed[items] = True
        items, ends = _shuffled_bins(items, np.array(ends), rows_before)
        binned = pieces[items]
        finished = (binned.stops == binned.lengths).astype(np.int64)
        return _planned(
            binned,
            ends,
            np.add.reduceat(finished, np.concatenate(([0], ends[:-1]))),
            pieces[~placed],
            self.row_length,
        )


class SequentialPlanner:
    """One stream, cut into windows; the rule is that of ``SequentialPacker``.

    Args:
        row_length: T, positions of a row.
        buffer_docs: documents that are planned at a time; changes nothing but memory.
    """

    def __init__(self, row_length: int, buffer_docs: int):
        self.row_length = row_length
        self.buffer_docs = buffer_docs

    def prepare(self, new: Pieces) -> Pieces:
        """New documents as they are; windows cut them."""
        return new

    def resume(self, held: Pieces) -> Pieces:
        """Pieces of which documents and starts were saved: they reach to the end."""
        return held

    def unread(self, rows: PlannedRows, next_row: int, rows_before: int) -> Pieces:
        """The documents of a planning that are left from row ``next_row`` on, to their ends."""
        begin = rows.ends[next_row - 1] if next_row else 0
        windows = rows.pieces[begin:] + rows.rest
        if not len(windows):
            return windows
        # A window begins with the last token of the one before it.
        continues = np.zeros(len(windows), bool)
        continues[1:] = (windows.documents[1:] == windows.documents[:-1]) & (
            windows.starts[1:] == windows.stops[:-1] - 1
        )
        left = windows[~continues]
        left = Pieces(left.documents, left.starts, left.lengths, left.lengths)
        # The first token was the last label of an earlier window; alone it teaches nothing.
        was_label = bool(next_row or rows_before) and left.starts[0] == left.lengths[0] - 1
        return left[int(was_label) :]

    def plan(self, pieces: Pieces, rows_before: int, last: bool) -> PlannedRows:
        """Windows of the stream of pieces; see :meth:`BinPlanner.plan`."""
        row_length = self.row_length
        sizes = pieces.stops - pieces.starts
        stream_stops = np.cumsum(sizes)
        transitions = int(stream_stops[-1]) - 1
        rows = -(-transitions // row_length) if last else transitions // row_length
        if last and not transitions and not rows_before:
            rows = 1  # a stream of one token
        firsts = np.arange(rows, dtype=np.int64) * row_length
        lasts = np.minimum(firsts + row_length, transitions)
        first_pieces = np.searchsorted(stream_stops, firsts, "right")
        counts = np.searchsorted(stream_stops, lasts, "right") - first_pieces + 1
        ends = np.cumsum(counts)
        index = np.arange(counts.sum()) + np.repeat(first_pieces - ends + counts, counts)
        parts, begins = pieces[index], (stream_stops - sizes)[index]
        starts = parts.starts + np.maximum(np.repeat(firsts, counts) - begins, 0)
        stops = np.minimum(parts.stops, parts.starts + np.repeat(lasts + 1, counts) - begins)
        # The first token of a window was the last one of the window before, and counted there.
        final_tokens = stream_stops[pieces.stops == pieces.lengths] - 1
        if rows_before:
            final_tokens = final_tokens[final_tokens > 0]
        windows = np.maximum(final_tokens - 1, 0) // row_length
        return _planned(
            Pieces(parts.documents, starts, stops, parts.lengths),
            ends,
            np.bincount(windows[windows < rows], minlength=rows),
            self._rest(pieces, stream_stops, rows, last),
            row_length,
        )

    def _rest(self, pieces: Pieces, stream_stops: np.ndarray, rows: int, last: bool) -> Pieces:
        if last:
            return Pieces.none()
        done = rows * self.row_length  # the next window begins with this token
        index = int(np.searchsorted(stream_stops, done, "right"))
        rest = pieces[index:]
        starts = rest.starts.copy()
        starts[0] = rest.stops[0] - (stream_stops[index] - done)
        return Pieces(rest.documents, starts, rest.stops, rest.lengths)


Planner = BinPlanner | SequentialPlanner


def _shuffled_bins(items: np.ndarray, ends: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The bins in a random order: their items, bin after bin, and where each bin ends."""
    order = list(range(len(ends)))
    random.Random(seed).shuffle(order)
    sizes = np.diff(ends, prepend=0)
    begins, sizes = (ends - sizes)[order], sizes[order]
    ends = np.cumsum(sizes)
    index = np.arange(len(items)) + np.repeat(begins - ends + sizes, sizes)
    return items[index], ends


def _planned(
    pieces: Pieces, ends: np.ndarray, documents: np.ndarray, rest: Pieces, row_length: int
) -> PlannedRows:
    if not len(ends):
        return PlannedRows(Pieces.none(), [], [], [], rest)
    begins = np.concatenate(([0], ends[:-1]))
    tokens = np.add.reduceat(pieces.stops - pieces.starts, begins)
    return PlannedRows(
        pieces, ends.tolist(), np.minimum(tokens, row_length).tolist(), documents.tolist(), rest
    )
