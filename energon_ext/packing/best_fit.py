# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Whole documents in full rows."""

import numpy as np

from energon_ext.arguments import check_integer
from energon_ext.errors import ConfigError
from energon_ext.packing.fill import best_fit_decreasing, fill_bins
from energon_ext.packing.pieces import PackPlan, Pieces, check_seq_len

#: Share of a buffer that is left for the next rows. More of it fills them better, and costs time.
DEFAULT_CARRY = 0.3

#: A buffer of documents that are in memory ends with so many rows of tokens, if these are more
#: than so many tokens.
MOST_ROWS, MOST_TOKENS = 256, 2**20

#: Most pieces that are left; so many fill rows to 99.98 % with a buffer of any size.
MOST_CARRIED = 256


class BestFitPacker:
    """Fills bins of T + 1 tokens from a buffer of documents, see :mod:`energon_ext.packing.fill`.

    Some pieces are left and meet the documents that come next. The bins of one plan are handed out
    in a random order that depends on the number of rows before alone: otherwise the pieces of a
    long document would make rows in a run. A bin begins with the oldest piece of the buffer, so
    none waits for a third plan.

    Args:
        seq_len: T, positions of a row.
        max_docs_per_bin: most pieces in one row, None for no limit.
        carry: share of the buffer that is left for the next plan, 0 <= carry < 1.
        alignment: positions that every document is rounded up to.

    Raises:
        ConfigError: an argument out of range.

    Example:
        >>> packer = BestFitPacker(seq_len=7, carry=0)
        >>> documents, lengths = np.arange(4), np.array([6, 2, 6, 2])
        >>> plan = packer.plan(Pieces.none(), Pieces.whole(documents, documents, lengths))
        >>> sorted(row.tolist() for row in np.split(plan.pieces.documents, plan.ends[:-1]))
        [[0, 1], [2, 3]]
    """

    def __init__(
        self,
        seq_len: int,
        *,
        max_docs_per_bin: int | None = None,
        carry: float = DEFAULT_CARRY,
        alignment: int = 1,
    ):
        check_seq_len(seq_len)
        if max_docs_per_bin is not None:
            check_integer("packing_max_docs_per_bin", max_docs_per_bin, 1)
        if not 0 <= carry < 1:
            raise ConfigError(f"packing_carry: {carry!r} found, 0 <= carry < 1 is needed.")
        self.seq_len = seq_len
        self.max_docs_per_bin = max_docs_per_bin
        self.carry = carry
        self.alignment = alignment

    def is_enough(self, documents: int, tokens: int, buffer_docs: int) -> bool:
        """Whether a buffer holds enough to pack: documents, or tokens where they are long."""
        return documents >= buffer_docs or tokens >= most_tokens(self.seq_len)

    def resumed(self, carried: Pieces) -> Pieces:
        """Carried pieces of which only the starts were saved, with their stops."""
        stops = np.minimum(carried.starts + self.seq_len + 1, carried.lengths)
        return Pieces(carried.documents, carried.places, carried.starts, stops, carried.lengths)

    def plan(
        self, carried: Pieces, new: Pieces, *, rows_before: int = 0, last: bool = False
    ) -> PackPlan:
        """Pack a buffer.

        Args:
            carried: what the plan before left; the oldest first.
            new: whole documents.
            rows_before: rows that earlier plans made; names the order of these.
            last: no more will come; nothing is carried.
        """
        pieces = carried + new.cut(self.seq_len + 1)
        items, bins = self._bins(pieces.stops - pieces.starts, last)
        is_placed = np.zeros(len(pieces), bool)
        is_placed[items] = True
        items, ends = _shuffled(items, np.array(bins, np.int64), rows_before)
        placed = pieces[items]
        finished = np.concatenate(([0], np.cumsum(placed.stops == placed.lengths)))
        documents = np.diff(finished[ends], prepend=0)
        return PackPlan.of(placed, ends, documents, pieces[~is_placed], self.seq_len)

    def _bins(self, lengths: np.ndarray, last: bool) -> tuple[np.ndarray, list[int]]:
        sizes, capacity, most = lengths, self.seq_len + 1, self.max_docs_per_bin
        if self.alignment > 1:  # units of so many positions; the T + 1st token, a label, has none
            sizes = -(-np.minimum(lengths, self.seq_len) // self.alignment)
            capacity = self.seq_len // self.alignment
        if not last:
            keep = min(int(self.carry * len(sizes)), MOST_CARRIED)
            return fill_bins(sizes, capacity, keep=keep, max_items_per_bin=most)
        bins = best_fit_decreasing(sizes.tolist(), capacity, max_items_per_bin=most)
        items = [item for each in bins for item in each]
        return np.array(items, np.int64), np.cumsum([len(each) for each in bins]).tolist()


def most_tokens(seq_len: int) -> int:
    """Tokens of documents in memory with which a buffer of one source is full."""
    return max(MOST_ROWS * seq_len, MOST_TOKENS)


def _shuffled(items: np.ndarray, ends: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The bins in a random order: their items, bin after bin, and where each bin ends."""
    # Raw numbers: NumPy promises that these stay, and not what its generators make of them.
    order = np.argsort(np.random.Philox(key=seed).random_raw(len(ends)), kind="stable")
    sizes = np.diff(ends, prepend=0)
    begins, sizes = (ends - sizes)[order], sizes[order]
    ends = np.cumsum(sizes)
    index = np.arange(len(items)) + np.repeat(begins - ends + sizes, sizes)
    return items[index], ends
