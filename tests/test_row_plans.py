# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Rows planned on arrays hold what packers make of documents that come one by one."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon_ext.packing import BinPlanner, Pieces, SequentialPacker, SequentialPlanner

PLANNERS = {
    "bin": lambda row_length: BinPlanner(row_length, 6),
    "bin, at most 2 a row": lambda row_length: BinPlanner(row_length, 5, max_docs_per_bin=2),
    "bin, aligned": lambda row_length: BinPlanner(2 * row_length, 5, alignment=2),
    "sequential": lambda row_length: SequentialPlanner(row_length, 4),
}
every_planner = pytest.mark.parametrize("make", PLANNERS.values(), ids=PLANNERS)
lengths_lists = st.lists(st.integers(0, 30), min_size=1, max_size=25)


def plan_all(planner, lengths):
    """Rows of documents ``0..n-1``, planned as a source does: a buffer at a time."""
    lengths = np.array(lengths, np.int64)
    rows, held, at = [], Pieces.none(), 0
    while True:
        stop = max(at, min(len(lengths), at + planner.buffer_docs - len(np.unique(held.documents))))
        stop = max(stop, min(at + 1, len(lengths)))
        new = np.arange(at, stop)
        held, at = held + planner.prepare(Pieces.whole(new, lengths[new])), stop
        if not len(held):
            if at == len(lengths):
                return rows
            continue
        planned = planner.plan(held, len(rows), last=at == len(lengths))
        begins = [0, *planned.ends[:-1]]
        for begin, end, tokens, documents in zip(
            begins, planned.ends, planned.tokens, planned.documents
        ):
            part = planned.pieces[begin:end]
            spans = list(zip(part.documents.tolist(), part.starts.tolist(), part.stops.tolist()))
            rows.append((spans, tokens, documents))
        held = planned.rest
        if at == len(lengths) and not len(held):
            return rows


@every_planner
@given(lengths=lengths_lists, row_length=st.integers(2, 12))
def test_every_transition_is_planned_exactly_once_and_no_row_overflows(make, lengths, row_length):
    planner = make(row_length)
    rows = plan_all(planner, lengths)
    counts = Counter(
        (document, position)
        for spans, _, _ in rows
        for document, start, stop in spans
        for position in range(start, stop - 1)
    )
    expected = {(doc, pos) for doc, length in enumerate(lengths) for pos in range(length - 1)}
    assert set(counts) == expected
    assert set(counts.values()) <= {1}
    for spans, tokens, _ in rows:
        total = sum(stop - start for _, start, stop in spans)
        assert 1 <= total <= planner.row_length + 1
        assert tokens == min(total, planner.row_length)
        assert all(stop > start for _, start, stop in spans)
    assert sum(documents for _, _, documents in rows) == sum(length > 0 for length in lengths)


@given(lengths=lengths_lists, row_length=st.integers(2, 12))
def test_windows_are_those_of_the_packer(lengths, row_length):
    packer = SequentialPacker(row_length)
    for document, length in enumerate(lengths):
        packer.add(document, length)
    expected = [
        ([(p.document, p.start, p.stop) for p in plan.pieces], plan.documents)
        for plan in packer.flush()
    ]
    found = plan_all(SequentialPlanner(row_length, 4), lengths)
    assert [(spans, documents) for spans, _, documents in found] == expected
