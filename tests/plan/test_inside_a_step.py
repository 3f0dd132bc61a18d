# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""A state from inside a step continues that step unchanged, or is refused with the field."""

from functools import partial

import numpy as np
import pytest

from energon_ext import PackedTaskEncoder, StateMismatchError
from energon_ext.encoders import plan_mix
from energon_ext.plan.cost import AttentionCost
from tests.plan.runs import SEQ_LEN, Run, write_numbered, write_split
from tests.support import LargeTokenizer

ROWS = 16
SQUARES = AttentionCost(linear=0, quadratic=1)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    # Otherwise small buffers are raised to the default.
    monkeypatch.setattr(plan_mix, "MAX_BUFFER_DOCS", 1)
    for number, name in enumerate("abc"):
        write_numbered(tmp_path / name, 150, 100 + 10_000 * number, seed=number)
    return tmp_path


def new_run(
    folder,
    *,
    weight=2,
    limit=2,
    inner="inner.yaml",
    new_source="baseline",
    exclude=(),
    axis="steps",
    packing_buffer_docs=8,
    balance=None,
    cost=None,
    **topology,
):
    write_split(folder / inner, {"blend": [{"path": "b"}, {"path": "c"}]})
    entries = [{"path": "a", "weight": weight, "max_epochs": limit}, {"path": inner}]
    (folder / "excluded.txt").write_text("".join(f"{line}\n" for line in exclude))
    mix = write_split(
        folder / "mix.yaml",
        {"interleave": entries, "new_source": new_source},
        exclude="excluded.txt",
        schedule_axis=axis,
    )
    encoder = PackedTaskEncoder(
        LargeTokenizer(),
        SEQ_LEN,
        packing_buffer_docs=packing_buffer_docs,
        balance=balance,
        cost=cost,
    )
    return Run(mix, **{"ranks": 2, "batch": 2, "rows": ROWS, **topology}, encoder=encoder)


def inside(run, batches=6):
    """Return the state of a run after a step and a half, and its next batches."""
    draw(run, batches)
    return run.state(), draw(run)


def draw(run, batches=6):
    """Return the tokens of the next batches of every rank."""
    iterators = [iter(loader) for loader in run.loaders]
    return [next(i).tokens.tolist() for _ in range(batches) for i in iterators]


CHANGES = {
    "weight": ({"weight": 3}, "mixture"),
    "max_epochs": ({"limit": 3}, "max_epochs"),
    "name of a nested node": ({"inner": "other.yaml"}, "mixture"),
    "new_source": ({"new_source": "zero"}, "mixture"),
    "exclude": ({"exclude": ["a:5"]}, "exclude"),
    "axis": ({"axis": "tokens"}, "axis: saved 'steps', now 'tokens'"),
    "packing_buffer_docs": ({"packing_buffer_docs": 20}, "packing_buffer_docs"),
    "balance": ({"balance": "attention"}, "cost: saved None, now '"),
    "ranks": ({"ranks": 1}, "ranks: saved 2, now 1"),
    "batch_size": ({"batch": 4}, "batch_size: saved 2, now 4"),
    "rows_per_step": ({"rows": 32}, "rows_per_step: saved 16, now 32"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_inside_a_step_the_settings_it_was_drawn_with_may_not_change(folder, name):
    changes, field = CHANGES[name]
    state, _ = inside(new_run(folder))
    with pytest.raises(StateMismatchError, match=f"{field}.*saved inside a step"):
        new_run(folder, **changes).resume(state)


@pytest.mark.parametrize("name", CHANGES)
def test_between_two_steps_any_option_may_change(folder, name):
    state, _ = inside(new_run(folder), batches=8)
    assert new_run(folder, **CHANGES[name][0]).resume(state).step() is not None


@pytest.mark.parametrize(
    ("cost", "workers"),
    [
        (None, 2),
        (SQUARES, 0),
        pytest.param(None, 0, marks=pytest.mark.nightly),
        pytest.param(SQUARES, 2, marks=pytest.mark.nightly),
    ],
)
def test_any_number_of_workers_finishes_an_open_step(folder, cost, workers):
    options = {"balance": None if cost is None else "attention", "cost": cost}
    state, expected = inside(new_run(folder, **options))
    again = new_run(folder, **options, workers=workers).resume(state)
    assert again.state() == state
    assert draw(again) == expected
    if cost is not None:
        with pytest.raises(StateMismatchError, match="cost: .*saved inside a step"):
            new_run(folder, balance="attention", cost=AttentionCost(1, 1)).resume(state)


def closure(sign):
    return lambda lengths: sign * lengths.astype(float)


class Instance:
    def __init__(self, sign):
        self.sign = sign

    def __call__(self, lengths):
        return closure(self.sign)(lengths)


@pytest.mark.parametrize("cost", [closure, Instance, lambda sign: partial(np.multiply, sign)])
def test_a_custom_cost_is_identified_by_its_values(folder, cost):
    state, expected = inside(new_run(folder, balance="attention", cost=cost(1)))
    again = new_run(folder, balance="attention", cost=cost(1)).resume(state)
    assert draw(again) == expected
    with pytest.raises(StateMismatchError, match="cost: .*saved inside a step"):
        new_run(folder, balance="attention", cost=cost(-1)).resume(state)
