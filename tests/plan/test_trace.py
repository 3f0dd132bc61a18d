# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Traces give the rank that reads each row of a step; results worked out by hand."""

import numpy as np

from energon_ext.plan.cost import AttentionCost
from energon_ext.plan.step import Step
from energon_ext.plan.topology import Topology
from energon_ext.plan.trace import rows_of
from tests.plan.memory_documents import planned

#: Two ranks of two micro-batches of two rows.
TOPOLOGY = Topology(rows_per_step=8, batch_rows=2, ranks=2)
KEYS = ("a", "b")


def step_without_two_rows():
    """Return a step of 8-token documents, one per row, with no row at places 3 and 6."""
    step = Step()
    for source, places in enumerate(([0, 4, 5], [1, 2, 7])):
        rows = planned([8] * 5, packing="sequential", seq_len=8, epochs=1)
        step.put(np.array(places), rows.take(3), source)
    return step


def test_a_trace_gives_rank_micro_batch_and_contents_of_every_row():
    step = step_without_two_rows()
    found = [each.to_json() for each in rows_of(step, TOPOLOGY, KEYS)]
    assert [each["row"] for each in found] == list(range(8))
    assert [each["rank"] for each in found] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert [each["micro_batch"] for each in found] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [each["source"] for each in found] == ["a", "b", "b", None, "a", "a", None, "b"]
    assert found[3] == {"row": 3, "rank": 1, "micro_batch": 0, "source": None, "contents": []}
    for place, expected in ((0, 0), (4, 1), (5, 2)):
        taken, number, _ = step.row(place)
        assert number == expected and found[place]["contents"] == taken.contents(number) != []
    assert [step.row(number) is None for number in range(8)] == [
        each["source"] is None for each in found
    ]


def test_a_trace_follows_rows_balanced_by_cost():
    step = step_without_two_rows()
    costs = step.costs(AttentionCost(linear=1, quadratic=0), 8)
    assert costs.tolist() == [9, 9, 9, 0, 9, 9, 0, 9]  # including the last label
    step.balance(AttentionCost(linear=1, quadratic=0), TOPOLOGY)
    empty = [each.rank for each in rows_of(step, TOPOLOGY, KEYS) if each.source is None]
    assert sorted(empty) == [0, 1]  # rows 3 and 6 were both on rank 1 before
