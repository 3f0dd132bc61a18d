# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Packers at work as a source uses them: a buffer of documents at a time."""

from collections import Counter

import numpy as np

from energon_ext.packing import Pieces


def documents(first, lengths):
    """Whole documents with numbers from ``first`` on; each place is seven times the number."""
    numbers = np.arange(first, first + len(lengths))
    return Pieces.whole(numbers, 7 * numbers, np.array(lengths, np.int64))


def pieces_of(ranges, lengths):
    """Pieces of ``(document, start, stop)`` each, of documents of some lengths."""
    numbers, starts, stops = np.array(ranges, np.int64).T
    return Pieces(numbers, 7 * numbers, starts, stops, np.array(lengths)[numbers])


def rows_of(plan):
    """``(spans, documents that end)`` of every row."""
    spans = plan.pieces.ranges()
    begins = [0, *plan.ends.tolist()]
    return [
        (spans[begin:end], int(documents))
        for begin, end, documents in zip(begins, begins[1:], plan.documents)
    ]


def plans_of(packer, lengths, buffer_docs=6):
    """Every plan of documents ``0 .. n - 1``."""
    carried, rows_before, arrived = Pieces.none(), 0, 0
    while arrived < len(lengths) or len(carried):
        new = max(1, buffer_docs - len(np.unique(carried.documents)))
        stop = min(len(lengths), arrived + new)
        plan = packer.plan(
            carried,
            documents(arrived, lengths[arrived:stop]),
            rows_before=rows_before,
            last=stop == len(lengths),
        )
        yield plan
        arrived, carried, rows_before = stop, plan.carried, rows_before + len(plan)


def pack_all(packer, lengths, buffer_docs=6):
    """Every row of documents ``0 .. n - 1``."""
    return [row for plan in plans_of(packer, lengths, buffer_docs) for row in rows_of(plan)]


def transitions(rows):
    """How often each transition (document, position of the input) lies in a row."""
    return Counter(
        (document, position)
        for spans, _ in rows
        for document, start, stop in spans
        for position in range(start, stop - 1)
    )
