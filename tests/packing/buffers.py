# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Packers used as a source uses them: one buffer of documents at a time."""

from collections import Counter

import numpy as np

from energon_ext.packing import Pieces, pack_apart


def documents(first, lengths):
    """Return whole documents numbered from ``first``; each place is seven times the number."""
    numbers = np.arange(first, first + len(lengths))
    return Pieces.whole(numbers, np.array(lengths, np.int64))


def pieces_of(ranges, lengths):
    """Return the pieces for ``(document, start, stop)`` ranges."""
    numbers, starts, stops = np.array(ranges, np.int64).T
    return Pieces(numbers, starts, stops, np.array(lengths)[numbers], np.zeros_like(numbers))


def rows_of(plan):
    """Return ``(spans, number of documents that end)`` for every row."""
    spans = plan.pieces.ranges()
    begins = [0, *plan.ends.tolist()]
    return [
        (spans[begin:end], int(documents))
        for begin, end, documents in zip(begins, begins[1:], plan.documents)
    ]


def plans_of(packer, lengths, buffer_docs=6, epochs=1):
    """Yield every plan of documents ``0 .. n - 1``; an epoch begins with a new buffer."""
    carried, rows_before = Pieces.none(), 0
    for epoch in range(epochs):
        arrived = 0
        while arrived < len(lengths):
            new = max(1, buffer_docs - len(np.unique(carried.documents)))
            stop = min(len(lengths), arrived + new)
            plan = pack_apart(
                packer,
                carried,
                documents(arrived, lengths[arrived:stop]),
                rows_before=rows_before,
                last=stop == len(lengths) and epoch == epochs - 1,
            )
            yield plan
            arrived, carried, rows_before = stop, plan.carried, rows_before + len(plan)
    assert not len(carried)


def pack_all(packer, lengths, buffer_docs=6, epochs=1):
    """Return every row of documents ``0 .. n - 1``."""
    plans = plans_of(packer, lengths, buffer_docs, epochs)
    return [row for plan in plans for row in rows_of(plan)]


def has_copies(spans):
    """Return True if a row has a token of a document twice."""
    tokens = [(doc, p) for doc, start, stop in spans for p in range(start, stop)]
    return len(set(tokens)) < len(tokens)


def transitions(rows):
    """Count how often each transition (document, position of the input) is in a row."""
    return Counter(
        (document, position)
        for spans, _ in rows
        for document, start, stop in spans
        for position in range(start, stop - 1)
    )
