# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Pack a buffer with any packer so that copies of a document are in different rows.

A buffer has two copies of a document if one was carried over the end of an epoch and the next epoch
has reached the other. :class:`~energon_ext.packing.BestFitPacker` keeps them apart itself. If other
packers put copies into one row, they are given one copy of each document first. What they leave is
packed together with the second copies, and so on.
"""

from collections import defaultdict
from dataclasses import replace

import numpy as np

from energon_ext.packing.packer import Packer
from energon_ext.packing.pieces import PackPlan, Pieces, find_repeated


def pack_apart(
    packer: Packer, carried: Pieces, new: Pieces, *, rows_before: int, last: bool
) -> PackPlan:
    """Pack a buffer of documents into rows; an empty one gives no rows.

    While one copy of each document is too little for a row, all pieces are carried over. A third
    copy shows that the source has nothing else; only then, or at the end of a stream, do copies
    share a row.

    Args:
        carried, new, rows_before, last: as for :meth:`Packer.plan`.
    """
    done = PackPlan.none()
    while len(carried) or len(new):
        plan = packer.plan(carried, new, rows_before=rows_before, last=last)
        if not _has_copies(plan):
            return done + plan
        pieces = carried + new
        earlier = _count_earlier_copies(pieces.documents, pieces)
        is_first = earlier == 0
        ones = carried[is_first[: len(carried)]], new[is_first[len(carried) :]]
        first = packer.plan(*ones, rows_before=rows_before)
        if not len(first) and last and not packer.cuts_documents:
            first = packer.plan(*ones, rows_before=rows_before, last=True)
        if not len(first) and (last or earlier.max() > 1):
            return done + plan
        if not len(first):
            return replace(done, carried=pieces)
        done += first
        rows_before += len(first)
        carried, new = first.carried + pieces[~is_first], Pieces.none()
    return done


def _has_copies(plan: PackPlan) -> bool:
    """Return whether a row has two copies of a document, or of a part of one."""
    rows = np.repeat(np.arange(len(plan)), np.diff(plan.ends, prepend=0))
    documents_in_rows = plan.pieces.documents * len(plan) + rows
    return bool(_count_earlier_copies(documents_in_rows, plan.pieces).any())


def _count_earlier_copies(keys: np.ndarray, pieces: Pieces) -> np.ndarray:
    """Return how many earlier pieces have the same key and tokens of each piece, int64 [n].

    Two pieces of one reading of a document have at most the boundary token in common.
    """
    counts = np.zeros(len(pieces), np.int64)
    several = np.flatnonzero(np.isin(keys, find_repeated(keys)))
    ranges = defaultdict[int, list[tuple[int, int]]](list)
    for index, key, (_, start, stop) in zip(
        several.tolist(), keys[several].tolist(), pieces[several].ranges()
    ):
        counts[index] = sum(
            start == begin or stop == end or min(stop, end) - max(start, begin) > 1
            for begin, end in ranges[key]
        )
        ranges[key].append((start, stop))
    return counts
