# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""A run is arithmetic: it draws without Energon, and forks draw on their own."""

import itertools
import subprocess
import sys

import numpy as np
import pytest

from energon_ext.errors import StateMismatchError
from energon_ext.mixture.tree import BLEND, INTERLEAVE, blend_of
from energon_ext.packing import make_packer
from energon_ext.plan.clock import Clock
from energon_ext.plan.cursor import fork_at, restore_cursor, save_cursor
from energon_ext.plan.packed_rows import PackedRows
from energon_ext.plan.run import Run, RunOptions
from energon_ext.plan.spec import KindSpec, Spec
from energon_ext.plan.topology import Topology
from energon_ext.weights import ConstantWeight, ScheduleAxis
from tests.plan.memory_documents import planned_source

RULES = pytest.mark.parametrize("rule", [BLEND, INTERLEAVE])


def run_of(sources=4, rule=INTERLEAVE, epochs=None, pads=True):
    """Return a run over documents in memory, with eight rows per step."""
    rng = np.random.default_rng(0)
    built = [
        planned_source(f"s{n}", rng.integers(1, 40, 30 + n).tolist(), epochs=epochs, buffer_docs=8)
        for n in range(sources)
    ]
    weights = {source.key: ConstantWeight(1 + n % 3) for n, source in enumerate(built)}
    clock = Clock(ScheduleAxis(), Topology(8), 16)
    documents = KindSpec(packer=make_packer("bin", 16).to_json())
    loss = {"alignment": 1, "mask_boundary_loss": True, "train_on_eos": True}
    spec = Spec(row_tokens=16, kinds={"documents": documents}, pads=pads, loss=loss)
    options = RunOptions(spec=spec)
    return Run(built, tree=blend_of(weights, rule), clock=clock, options=options)


def take(items, count):
    """Return the next items, fewer at the end."""
    return list(itertools.islice(items, count))


def contents(steps):
    """Return the pieces of every row of steps, with its source."""
    found = []
    for step in steps:
        for row in range(8):
            taken, index, source = step.row(row)
            found.append((source, taken.contents(index)))
    return found


def hand_out(run, steps):
    """Read steps, as a loader does."""
    for round_ in take(run.rounds(run.draw_own_steps()), 8 * steps):
        run.hand_out(round_)


@RULES
@pytest.mark.parametrize("ahead", [0, 1, 9])
def test_a_fork_continues_after_the_last_batch_and_not_where_the_plan_is(rule, ahead):
    expected = contents(take(run_of(rule=rule).draw_steps(), 30))
    run = run_of(rule=rule)
    hand_out(run, 10)
    run.rewind()
    take(run.draw_steps(), ahead)
    fork = run.fork()
    assert contents(take(fork.draw_steps(), 20)) == expected[80:]
    # Neither moves the other.
    assert contents(take(run.draw_steps(), 5)) == expected[8 * (10 + ahead) : 8 * (15 + ahead)]
    assert contents(take(fork.fork().draw_steps(), 20)) == expected[80:]


def test_a_fork_copies_the_rows_of_a_source_when_it_first_draws_from_it(monkeypatch):
    run = run_of(sources=40)
    hand_out(run, 20)
    copied, original = [], PackedRows.at
    monkeypatch.setattr(
        PackedRows, "at", lambda self, *where: copied.append(self.key) or original(self, *where)
    )
    fork = run.fork()
    assert copied == []
    (step,) = take(fork.draw_steps(), 1)
    drawn = {f"s{step.row(row)[2]}" for row in range(8)}
    assert len(copied) == len(drawn) < 9


@pytest.mark.parametrize("epochs", [1, 2])
def test_a_fork_draws_from_sources_that_have_ended_only_further_ahead(epochs):
    options = {"epochs": epochs, "pads": False}
    whole = contents(take(run_of(**options).draw_steps(), 1000))
    run, steps = run_of(**options), len(whole) // 8
    hand_out(run, steps - 2)
    run.rewind()
    assert len(take(run.draw_steps(), 1000)) == 2 and run.plan.ended
    assert contents(take(run.fork().draw_steps(), 1000)) == whole[-16:]


def test_a_fork_at_a_cursor_is_where_the_cursor_was_saved():
    run = run_of()
    hand_out(run, 7)
    cursor = save_cursor(run)
    hand_out(run, 5)
    expected = contents(take(run_of().draw_steps(), 20))
    assert contents(take(fork_at(run, cursor).draw_steps(), 13)) == expected[56:]
    assert run.batches_read == 12 * 8


def test_a_refused_cursor_leaves_the_run_where_it_was():
    run = run_of()
    hand_out(run, 7)
    cursor = save_cursor(run)
    cursor["spec"]["seed"] = 1
    with pytest.raises(StateMismatchError):
        restore_cursor(run, cursor)
    assert (
        contents(take(run.fork().draw_steps(), 3)) == contents(take(run_of().draw_steps(), 10))[56:]
    )


def test_a_cursor_names_the_data_of_each_span_of_steps_also_if_they_come_back():
    cursor, found = None, []
    for sources, steps in ((4, 2), (3, 3), (4, 4), (4, 1)):
        run = run_of(sources=sources)
        if cursor is not None:
            restore_cursor(run, cursor)
        hand_out(run, steps)
        cursor = save_cursor(run)
        found.append(run.data_digest)
    of_four, of_three = found[:2]
    assert of_four != of_three and found[2:] == [of_four] * 2
    assert cursor["data_digests"] == [[2, of_four], [5, of_three], [10, of_four]]


def test_planning_imports_neither_torch_nor_energon():
    code = (
        "import sys, energon_ext.plan.run, energon_ext.plan.cursor, energon_ext.plan.forecast;"
        "print([m for m in sys.modules if m.split('.')[0] in ('torch', 'megatron')])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
