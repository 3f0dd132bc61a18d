# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Whole documents in full rows.

Best-fit decreasing packing leaves the last bins of a buffer half empty, since no short document is
left to fill them. So a plan hands out all bins but the emptiest, and carries the pieces of these
over to the next plan, whose short documents fill them up.

No piece starves: the oldest sixteenth of the carried-over pieces is placed first, and the bins that
hold one of these are handed out however full they are. With at most 256 pieces carried over, a
piece is in a row after at most 53 more plans (with web pages and books, after 7).
"""

from dataclasses import dataclass, field

import numpy as np

from energon_ext.arguments import check_integer, check_number
from energon_ext.errors import ConfigError
from energon_ext.packing.bins import best_fit, longest_first
from energon_ext.packing.packer import Packer
from energon_ext.packing.pieces import PackPlan, Pieces

#: Most pieces that are carried over. Of web pages and books they fill 99.95 % of all positions,
#: with 512 documents in a buffer or more.
MOST_CARRIED = 256

#: Of this many carried-over pieces one, the oldest, is not carried over again.
CARRIED_PER_DUE = 16


@dataclass(frozen=True)
class BestFitPacker(Packer):
    """Packs a buffer of documents by best-fit decreasing, and carries the emptiest bins over.

    The bins of one plan are handed out in a random order that depends only on the number of rows
    before: otherwise the pieces of a long document would fill consecutive rows.

    Args:
        max_docs_per_bin: most pieces in one row, None for no limit.
        carry: share of the bins that is carried over to the next plan, 0 <= carry < 1.
        alignment: positions that every document is rounded up to.

    Example:
        >>> packer = BestFitPacker(seq_len=7, carry=0)
        >>> documents, lengths = np.arange(4), np.array([6, 2, 6, 2])
        >>> plan = packer.plan(Pieces.none(), Pieces.whole(documents, documents, lengths))
        >>> sorted(row.tolist() for row in np.split(plan.pieces.documents, plan.ends[:-1]))
        [[0, 1], [2, 3]]
    """

    name = "bin"
    cuts_documents = False

    max_docs_per_bin: int | None = field(default=None, kw_only=True)
    carry: float = field(default=0.3, kw_only=True)
    alignment: int = field(default=1, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_docs_per_bin is not None:
            check_integer("packing_max_docs_per_bin", self.max_docs_per_bin, 1)
        check_number("packing_carry", self.carry)
        if self.carry >= 1:
            raise ConfigError(f"packing_carry: {self.carry!r} found, a number < 1 is needed.")
        check_integer("alignment", self.alignment, 1)

    def resumed(self, carried: Pieces) -> Pieces:
        stops = np.minimum(carried.starts + self.seq_len + 1, carried.lengths)
        return Pieces(carried.documents, carried.places, carried.starts, stops, carried.lengths)

    def plan(
        self, carried: Pieces, new: Pieces, *, rows_before: int = 0, last: bool = False
    ) -> PackPlan:
        carried = carried.cut(self.seq_len + 1)  # those of longer rows before
        pieces = carried + new.cut(self.seq_len + 1)
        sizes, capacity = self._sizes(pieces.stops - pieces.starts)
        num_due = -(-len(carried) // CARRIED_PER_DUE)
        items = np.concatenate(
            (longest_first(sizes[:num_due]), num_due + longest_first(sizes[num_due:]))
        )
        bin_of = best_fit(sizes[items].tolist(), capacity, self.max_docs_per_bin)
        bins = np.arange(bin_of.max(initial=-1) + 1)
        if not last:
            filled = np.bincount(bin_of, sizes[items])
            filled[bin_of[:num_due]] = capacity  # handed out, however empty they are
            bins = np.delete(bins, self._emptiest(filled, np.bincount(bin_of), capacity))
        items, ends = row_after_row(items, bin_of, shuffled(bins, rows_before))
        is_left = np.ones(len(pieces), bool)
        is_left[items] = False
        placed, left = pieces[items], pieces[is_left]
        finished = np.concatenate(([0], np.cumsum(placed.stops == placed.lengths)))
        documents = np.diff(finished[ends], prepend=0)
        return PackPlan.of(placed, ends, documents, left, self.seq_len)

    def _sizes(self, lengths: np.ndarray) -> tuple[np.ndarray, int]:
        """Lengths of pieces, and the capacity of a bin, in tokens or in units of the alignment."""
        if self.alignment == 1:
            return lengths, self.seq_len + 1
        positions = np.minimum(lengths, self.seq_len)  # the T + 1st token, a label, has none
        return -(-positions // self.alignment), self.seq_len // self.alignment

    def _emptiest(self, filled: np.ndarray, counts: np.ndarray, capacity: int) -> np.ndarray:
        """The bins that are carried over."""
        bins = np.argsort(filled, kind="stable")[: int(self.carry * len(counts))]
        bins = bins[filled[bins] < capacity]
        return bins[np.cumsum(counts[bins]) <= MOST_CARRIED]


def shuffled(bins: np.ndarray, seed: int) -> np.ndarray:
    """The same bins in the random order of a seed, the same with every version of NumPy."""
    # NumPy promises to keep the raw numbers, and not what its generators derive from them.
    keys = np.random.Philox(key=seed).random_raw(len(bins))
    return bins[np.argsort(keys, kind="stable")]


def row_after_row(
    items: np.ndarray, bin_of: np.ndarray, rows: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Items of the bins that become rows, in the order of the rows, and where each row ends."""
    row_of_bin = np.full(bin_of.max(initial=-1) + 1, len(rows))  # behind all, if it is none
    row_of_bin[rows] = np.arange(len(rows))
    row_of = row_of_bin[bin_of]
    ends = np.cumsum(np.bincount(row_of, minlength=len(rows))[: len(rows)])
    return items[np.argsort(row_of, kind="stable")[: ends[-1] if len(ends) else 0]], ends
