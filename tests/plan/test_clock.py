# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Positions on the schedule axis equal a count of all steps before."""

from hypothesis import given
from hypothesis import strategies as st

from energon_ext.mixture.tree import BLEND, Node, Tree, blend_of
from energon_ext.plan.blend import Blend
from energon_ext.plan.clock import Clock
from energon_ext.plan.topology import Topology
from energon_ext.weights import ConstantWeight, LiveWeights, ScheduleAxis, weight_from_config
from energon_ext.weights.live import LiveWeight
from tests.plan.memory_documents import planned_source

UNITS = ("steps", "tokens", "batches")


@st.composite
def clocks(draw):
    """Draw a clock with disjoint skipped ranges."""
    batch_rows, ranks, rounds = (draw(st.integers(1, 4)) for _ in range(3))
    bounds = sorted(draw(st.sets(st.integers(0, 30), max_size=6)))
    topology = Topology(batch_rows * ranks * rounds, batch_rows, ranks, 0, draw(st.integers(1, 3)))
    axis = ScheduleAxis(draw(st.sampled_from(UNITS)))
    return Clock(axis, topology, draw(st.integers(1, 9)), tuple(zip(bounds[::2], bounds[1::2])))


def counted(clock, steps, batches, rows):
    """Return the position from counts."""
    tokens = rows * clock.row_tokens
    counts = {"steps": steps, "batches": batches, "samples": rows, "tokens": tokens}
    return counts[clock.axis.unit]


@given(clocks(), st.integers(0, 20), st.integers(0, 50))
def test_an_optimizer_step_comes_after_earlier_and_skipped_steps(clock, step, more):
    topology = clock.topology
    skipped = {n for first, stop in clock.skip for n in range(first, stop)}
    assert [n for n in range(40) if clock.is_skipped(n)] == sorted(skipped)
    planned = [n for n in range(60) if n not in skipped][step]
    rows = planned * topology.rows_per_step
    assert clock.at_step(step) == counted(clock, planned, planned * topology.rounds, rows)
    # After a resume with another global batch, the step begins with another row.
    first = step * topology.rows_per_step + more
    rows = first + (planned - step) * topology.rows_per_step
    batches = rows // topology.rows_per_round
    assert clock.at_step(step, first) == counted(clock, planned, batches, rows)


def test_position_of_a_step_follows_from_its_number_or_its_first_row():
    clock = Clock(ScheduleAxis("tokens"), Topology(8), row_tokens=16, skip=((2, 4),))
    blend = Blend([planned_source("a", [5] * 3)], blend_of({"a": ConstantWeight(1)}), clock)
    # Two steps are skipped. The run had 7 rows per step before, so step 3 begins with row 21.
    assert [blend.position(1), blend.position(3)] == [8 * 16, 5 * 8 * 16]
    assert blend.position(3, 21) == (21 + 2 * 8) * 16


def test_shares_of_a_step_follow_a_schedule_in_tokens():
    """A step has 8 x 16 = 128 tokens, so the breakpoint at 256 begins with step 2."""
    weights = {"a": ConstantWeight(1), "b": weight_from_config({"step": {0: 1, 256: 3}})}
    clock = Clock(ScheduleAxis("tokens"), Topology(8), row_tokens=16)
    blend = Blend([planned_source(key, [5] * 3) for key in weights], blend_of(weights), clock)
    shares = [blend.shares_at_step(step)["b"] for step in range(4)]
    assert shares == [0.5, 0.5, 0.75, 0.75]
    # 4 rows per step before: step 3 begins with row 12, at token 192.
    assert blend.shares_at_step(3, 12) == {"a": 0.5, "b": 0.5}
    assert blend.shares_at(256) == {"a": 0.25, "b": 0.75}


def test_shares_of_a_step_evaluate_only_weights_that_change():
    class Counted(ConstantWeight):
        evaluations = 0

        def segment(self, position):
            type(self).evaluations += 1
            return super().segment(position)

    weights = {"a": Counted(1), "b": Counted(3)}
    blend = Blend(
        [planned_source(key, [5] * 3) for key in weights],
        blend_of(weights),
        Clock(ScheduleAxis("steps"), Topology(8), row_tokens=16),
    )
    assert {tuple(blend.shares_at_step(step).values()) for step in range(50)} == {(0.25, 0.75)}
    assert Counted.evaluations == 2


def test_shares_of_a_step_follow_a_line_that_is_appended_later(tmp_path):
    live = LiveWeights(tmp_path / "live.jsonl")
    live.set(0, {"b": 3}, through=9)
    weights = {key: LiveWeight(live, [key], ConstantWeight(1)) for key in "ab"}
    tree = Tree(Node(BLEND, list(weights.values()), live=live), list(weights))
    clock = Clock(ScheduleAxis("steps"), Topology(8), row_tokens=16)
    blend = Blend([planned_source(key, [5] * 3) for key in weights], tree, clock)
    assert blend.shares_at_step(9)["b"] == blend.shares_at_step(10)["b"] == 0.75
    live.set(10, {"b": 1})
    assert [blend.shares_at_step(step)["b"] for step in (9, 10, 11)] == [0.75, 0.5, 0.5]
