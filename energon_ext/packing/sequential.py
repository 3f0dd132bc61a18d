# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Concatenate documents into one stream and cut it into windows."""

from dataclasses import dataclass, replace

import numpy as np

from energon_ext.packing.packer import Packer
from energon_ext.packing.pieces import PackPlan, Pieces


@dataclass(frozen=True)
class SequentialPacker(Packer):
    """Cuts the stream of documents into windows of T + 1 tokens at stride T.

    A document counts as ended in the window in which its last token is a label. A document of one
    token at the start of a stream, which is never a label, counts in the first window.

    Example:
        >>> packer = SequentialPacker(seq_len=4)
        >>> documents, lengths = np.arange(3), np.array([5, 4, 6])
        >>> plan = packer.plan(Pieces.none(), Pieces.whole(documents, lengths))
        >>> parts = zip(plan.pieces.documents, plan.pieces.starts, plan.pieces.stops)
        >>> [tuple(map(int, part)) for part in parts]
        [(0, 0, 5), (0, 4, 5), (1, 0, 4), (1, 3, 4), (2, 0, 4)]
        >>> plan.ends.tolist(), plan.carried.starts.tolist()
        ([1, 3, 5], [3])
    """

    name = "sequential"
    cuts_documents = True

    def plan(
        self, carried: Pieces, new: Pieces, *, rows_before: int = 0, last: bool = False
    ) -> PackPlan:
        pieces = carried + new
        if not len(pieces):
            return PackPlan.none()
        # Row i is the window of the tokens i * T to i * T + T, counted in the stream.
        seq_len = self.seq_len
        sizes = pieces.stops - pieces.starts
        stream_stops = np.cumsum(sizes)
        transitions = int(stream_stops[-1]) - 1
        rows = -(-transitions // seq_len) if last else transitions // seq_len
        continues = rows_before > 0 and len(carried) > 0
        if last and not transitions and not continues:
            rows = 1  # the stream is a single token
        firsts = np.arange(rows, dtype=np.int64) * seq_len
        lasts = np.minimum(firsts + seq_len, transitions)
        first_pieces = np.searchsorted(stream_stops, firsts, "right")
        counts = np.searchsorted(stream_stops, lasts, "right") - first_pieces + 1
        ends = np.cumsum(counts)
        index = np.arange(counts.sum()) + np.repeat(first_pieces - ends + counts, counts)
        parts, begins = pieces[index], (stream_stops - sizes)[index]
        starts = parts.starts + np.maximum(np.repeat(firsts, counts) - begins, 0)
        stops = np.minimum(parts.stops, parts.starts + np.repeat(lasts + 1, counts) - begins)
        # The first token of a window is the last label of the previous one, and counts there.
        final_tokens = stream_stops[pieces.stops == pieces.lengths] - 1
        if continues:
            final_tokens = final_tokens[final_tokens > 0]
        windows = np.maximum(final_tokens - 1, 0) // seq_len
        return PackPlan.of(
            replace(parts, starts=starts, stops=stops),
            ends,
            np.bincount(windows[windows < rows], minlength=rows),
            self._carry(pieces, stream_stops, rows, last),
            seq_len,
        )

    def _carry(self, pieces: Pieces, stream_stops: np.ndarray, rows: int, last: bool) -> Pieces:
        if last:
            return Pieces.none()
        done = rows * self.seq_len  # the next window begins with this token
        index = int(np.searchsorted(stream_stops, done, "right"))
        rest = pieces[index:]
        starts = rest.starts.copy()
        starts[0] = rest.stops[0] - (stream_stops[index] - done)
        return replace(rest, starts=starts)
