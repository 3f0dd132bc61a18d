# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Positions on the schedule axis, counted one by one."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_ext import ConfigError, DynamicBlendDataset
from energon_ext.plan.clock import Clock
from energon_ext.plan.deal import Topology
from energon_ext.plan.source import Source
from energon_ext.streamed.blend import current_batch_index
from energon_ext.weights import ScheduleAxis
from tests.plan.memory_documents import planned
from tests.support import config

UNITS = ("steps", "tokens", "batches")


@st.composite
def clocks(draw):
    """A clock with ranges of steps that do not touch each other, and its unit."""
    batch_rows, ranks, rounds = (draw(st.integers(1, 4)) for _ in range(3))
    bounds = sorted(draw(st.sets(st.integers(0, 30), max_size=6)))
    topology = Topology(batch_rows * ranks * rounds, batch_rows, ranks, 0, draw(st.integers(1, 3)))
    axis = ScheduleAxis(draw(st.sampled_from(UNITS)), draw(st.integers(0, 3)))
    return Clock(axis, topology, draw(st.integers(1, 9)), tuple(zip(bounds[::2], bounds[1::2])))


def counted(clock, steps, batches, rows):
    """The same as a sum."""
    of = {"steps": steps, "batches": batches, "tokens": rows * clock.row_tokens}
    return of[clock.axis.unit] + clock.axis.lookahead


@settings(max_examples=200)
@given(clocks(), st.integers(0, 20), st.integers(0, 50))
def test_an_optimizer_step_stands_behind_the_steps_before_it_and_those_it_skips(clock, step, more):
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


@settings(max_examples=100)
@given(clocks(), st.integers(0, 300))
def test_a_worker_stands_where_its_rows_times_all_workers_have_brought_the_run(clock, rows):
    topology = clock.topology
    rows *= topology.ranks * topology.workers
    steps, batches = rows // topology.rows_per_step, rows // topology.rows_per_round
    own = rows // (topology.ranks * topology.workers)
    assert clock.at_own(own) == counted(clock, steps, batches, rows)


@settings(max_examples=100)
@given(clocks(), st.integers(0, 300))
def test_now_is_the_batch_that_is_assembled(clock, batch):
    active = config()
    active.worker_activate(batch)
    try:
        step = batch // clock.topology.rounds
        rows = batch * clock.topology.batch_rows * clock.topology.ranks
        assert clock.now() == counted(clock, step, batch, rows)
        assert (clock.step_now(), current_batch_index()) == (step, batch)
    finally:
        active.worker_deactivate()


def test_a_blend_says_where_a_step_stands_by_its_number_or_by_its_first_row():
    blend = DynamicBlendDataset(
        [Source("a", planned([5] * 3))],
        topology=Topology(8),
        axis=ScheduleAxis("tokens"),
        row_tokens=16,
        skip=[(2, 4)],
        worker_config=config(),
    )
    # Two steps are skipped; the run had 7 rows a step before, and so begins step 3 with row 21.
    assert [blend.position(1), blend.position(3)] == [8 * 16, 5 * 8 * 16]
    assert blend.position(3, 21) == (21 + 2 * 8) * 16


def test_without_a_loader_there_is_no_now():
    with pytest.raises(ConfigError, match="without a loader"):
        current_batch_index()
