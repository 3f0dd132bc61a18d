# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Positions on the schedule axis, counted one by one."""

from hypothesis import given
from hypothesis import strategies as st

from energon_ext.mixture.tree import blend_of
from energon_ext.plan.clock import Clock
from energon_ext.plan.deal import Topology
from energon_ext.plan.source import Blend, Source
from energon_ext.weights import ConstantWeight, ScheduleAxis
from tests.plan.memory_documents import planned

UNITS = ("steps", "tokens", "batches")


@st.composite
def clocks(draw):
    """A clock with ranges of steps that do not touch each other, and its unit."""
    batch_rows, ranks, rounds = (draw(st.integers(1, 4)) for _ in range(3))
    bounds = sorted(draw(st.sets(st.integers(0, 30), max_size=6)))
    topology = Topology(batch_rows * ranks * rounds, batch_rows, ranks, 0, draw(st.integers(1, 3)))
    axis = ScheduleAxis(draw(st.sampled_from(UNITS)))
    return Clock(axis, topology, draw(st.integers(1, 9)), tuple(zip(bounds[::2], bounds[1::2])))


def counted(clock, steps, batches, rows):
    """The same as a sum."""
    tokens = rows * clock.row_tokens
    of = {"steps": steps, "batches": batches, "samples": rows, "tokens": tokens}
    return of[clock.axis.unit]


@given(clocks(), st.integers(0, 20), st.integers(0, 50))
def test_an_optimizer_step_is_behind_the_steps_before_it_and_those_it_skips(clock, step, more):
    topology = clock.topology
    left_out = {n for first, stop in clock.skip for n in range(first, stop)}
    assert [n for n in range(40) if clock.is_skipped(n)] == sorted(left_out)
    planned = [n for n in range(60) if n not in left_out][step]
    rows = planned * topology.rows_per_step
    assert clock.at_step(step) == counted(clock, planned, planned * topology.rounds, rows)
    # After a resume with another global batch, a step begins with another row.
    first = step * topology.rows_per_step + more
    rows = first + (planned - step) * topology.rows_per_step
    batches = rows // topology.rows_per_round
    assert clock.at_step(step, first) == counted(clock, planned, batches, rows)


def test_a_blend_says_where_a_step_stands_by_its_number_or_by_its_first_row():
    clock = Clock(ScheduleAxis("tokens"), Topology(8), row_tokens=16, skip=((2, 4),))
    blend = Blend([Source("a", planned([5] * 3))], blend_of({"a": ConstantWeight(1)}), clock)
    # Two steps are skipped; the run had 7 rows a step before, and so begins step 3 with row 21.
    assert [blend.position(1), blend.position(3)] == [8 * 16, 5 * 8 * 16]
    assert blend.position(3, 21) == (21 + 2 * 8) * 16
