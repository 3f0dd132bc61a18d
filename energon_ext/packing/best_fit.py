# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Pack whole documents into nearly full rows.

Best-fit decreasing leaves the last bins of a buffer half empty, because no short documents are left
to fill them. A pack plan therefore turns all bins into rows except the emptiest ones. The pieces in
those are carried over to the next plan, whose short documents fill the gaps.

Pieces that are carried over the end of an epoch meet the copies of the next one. Copies have the
same length, so best fit would place them side by side; a bin with a piece of the same document is
therefore passed over.

No piece starves: the oldest sixteenth of the carried-over pieces is placed first, and a bin with
one of them becomes a row however empty it is. With at most 256 pieces carried over, a piece is in a
row after at most 53 more plans (7 with web pages and books).
"""

from dataclasses import dataclass, field, replace

import numpy as np

from energon_ext.arguments import check_integer, check_number
from energon_ext.errors import ConfigError
from energon_ext.packing.bins import best_fit
from energon_ext.packing.packer import Packer
from energon_ext.packing.pieces import PackPlan, Pieces, find_repeated

#: Most pieces carried over. With buffers of at least 512 web pages and books this is enough to fill
#: 99.95 % of all positions.
MAX_CARRIED = 256

#: One in this many carried-over pieces, the oldest ones, is not carried over again.
CARRIED_PER_DUE = 16


@dataclass(frozen=True)
class BestFitPacker(Packer):
    """Packs a buffer of documents by best-fit decreasing, and carries over the emptiest bins.

    The rows of a plan are in a random order that depends only on the number of earlier rows;
    otherwise the pieces of a long document would fill consecutive rows.

    Args:
        max_docs_per_bin: most pieces in one row; None for no limit.
        carry: largest fraction of the bins to carry over to the next plan, 0 <= carry < 1.
        alignment: every document is padded to a multiple of this number of positions.

    Example:
        >>> packer = BestFitPacker(seq_len=7, carry=0)
        >>> documents, lengths = np.arange(4), np.array([6, 2, 6, 2])
        >>> plan = packer.plan(Pieces.none(), Pieces.whole(documents, lengths))
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

    def with_stops(self, carried: Pieces) -> Pieces:
        stops = np.minimum(carried.starts + self.seq_len + 1, carried.lengths)
        return replace(carried, stops=stops)

    def plan(
        self, carried: Pieces, new: Pieces, *, rows_before: int = 0, last: bool = False
    ) -> PackPlan:
        carried = carried.cut(self.seq_len + 1)  # after a resume with a smaller seq_len
        pieces = carried + new.cut(self.seq_len + 1)
        sizes, capacity = self._sizes(pieces.stops - pieces.starts)
        copies = _copies(pieces.documents, sizes < capacity)
        is_due = np.arange(len(pieces)) < -(-len(carried) // CARRIED_PER_DUE)
        if copies is not None:
            is_due[: len(carried)] |= copies[: len(carried)] >= 0
        items = np.lexsort((-sizes, ~is_due))
        num_due = np.count_nonzero(is_due)
        bin_of = best_fit(
            sizes[items].tolist(),
            capacity,
            self.max_docs_per_bin,
            None if copies is None else copies[items].tolist(),
        )
        bins = np.arange(bin_of.max(initial=-1) + 1)
        if not last:
            filled = np.bincount(bin_of, sizes[items])
            filled[bin_of[:num_due]] = capacity  # never carried over, however empty
            bins = np.delete(bins, self._emptiest(filled, np.bincount(bin_of), capacity))
        items, ends = _order_rows(items, bin_of, _shuffle(bins, rows_before))
        is_left = np.ones(len(pieces), bool)
        is_left[items] = False
        placed, left = pieces[items], pieces[is_left]
        finished = np.concatenate(([0], np.cumsum(placed.stops == placed.lengths)))
        documents = np.diff(finished[ends], prepend=0)
        return PackPlan.of(placed, ends, documents, left, self.seq_len)

    def _sizes(self, lengths: np.ndarray) -> tuple[np.ndarray, int]:
        """Return the sizes of pieces and the capacity of a bin, in tokens or alignment units."""
        if self.alignment == 1:
            return lengths, self.seq_len + 1
        positions = np.minimum(lengths, self.seq_len)  # token T + 1 is a label without a position
        return -(-positions // self.alignment), self.seq_len // self.alignment

    def _emptiest(self, filled: np.ndarray, counts: np.ndarray, capacity: int) -> np.ndarray:
        """Return the bins to carry over."""
        bins = np.argsort(filled, kind="stable")[: int(self.carry * len(counts))]
        bins = bins[filled[bins] < capacity]
        return bins[np.cumsum(counts[bins]) <= MAX_CARRIED]


def _copies(documents: np.ndarray, is_short: np.ndarray) -> np.ndarray | None:
    """Return the document of each piece that must be kept apart from others, -1 for the rest.

    A piece that fills a row needs no care. None if all other pieces are of different documents.

    Args:
        documents: the document of each piece, int64 [n].
        is_short: whether a piece leaves room for others, bool [n].
    """
    numbers = find_repeated(documents[is_short])
    if not len(numbers):
        return None
    return np.where(is_short & np.isin(documents, numbers), documents, -1)


def _shuffle(bins: np.ndarray, seed: int) -> np.ndarray:
    """Return bins in the random order of a seed."""
    # NumPy keeps the raw numbers stable across versions, but not what it derives from them.
    keys = np.random.Philox(key=seed).random_raw(len(bins))
    return bins[np.argsort(keys, kind="stable")]


def _order_rows(
    items: np.ndarray, bin_of: np.ndarray, bins: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the items of some bins, bin after bin, and the end of each bin among them."""
    row_of_bin = np.full(bin_of.max(initial=-1) + 1, len(bins))  # sorts all other bins last
    row_of_bin[bins] = np.arange(len(bins))
    row_of = row_of_bin[bin_of]
    ends = np.cumsum(np.bincount(row_of, minlength=len(bins))[: len(bins)])
    return items[np.argsort(row_of, kind="stable")[: ends[-1] if len(ends) else 0]], ends
