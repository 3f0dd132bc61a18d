# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Draws, saves, restores, damage and ends in any order, against a list and a place in it."""

import json
import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from energon_ext.errors import ConfigError, StateFormatError, StateMismatchError
from tests.plan.runs import Run, write_numbered
from tests.support import close_loaders

ROWS = 8
TOPOLOGIES = [(1, 0, 1), (1, 0, 8), (2, 0, 2), (4, 0, 1), (8, 0, 1)]


@pytest.fixture(scope="module")
def mix(tmp_path_factory):
    """Half of it ends: ``a`` is read twice, and then ``b`` alone, three times in all."""
    folder = tmp_path_factory.mktemp("machine")
    write_numbered(folder / "a", 60, 100, seed=1)
    write_numbered(folder / "b", 50, 10_000, seed=2)
    entries = [
        {"path": "a", "weight": {"linear": {0: 3, 6: 1}}, "max_epochs": 2},
        {"path": "b", "weight": 1, "max_epochs": 3},
    ]
    head = {"__module__": "energon_ext", "__class__": "ScheduledMetadataset"}
    path = folder / "mix.yaml"
    path.write_text(json.dumps({**head, "splits": {"train": {"interleave": entries}}}))
    return path


@pytest.fixture(scope="module")
def steps(mix):
    """All steps of a run that nobody disturbs, and None after them."""
    run, found = Run(mix, rows=ROWS), []
    while (step := run.step()) is not None:
        found.append(step)
    assert len(found) > 12
    return [*found, None]


def machine(mix, steps):
    class Machine(RuleBasedStateMachine):
        """The model is a place in a list of steps, and what was saved at which place."""

        @initialize(topology=st.sampled_from(TOPOLOGIES))
        def begin(self, topology):
            self.saved = []
            self.open(topology, None, 0)

        def open(self, topology, state, place):
            ranks, workers, batch = topology
            close_loaders()
            self.run = Run(mix, ranks=ranks, workers=workers, batch=batch, rows=ROWS)
            self.place, self.has_begun = place, state is not None
            if state is not None:
                self.run.resume(state)

        def teardown(self):
            close_loaders()

        @rule()
        def draw(self):
            assert self.run.step() == steps[min(self.place, len(steps) - 1)]
            self.place, self.has_begun = min(self.place + 1, len(steps) - 1), True

        @rule()
        def save(self):
            self.saved.append((self.run.state(), self.place))

        @precondition(lambda self: self.saved)
        @rule(data=st.data(), topology=st.sampled_from(TOPOLOGIES))
        def restore(self, data, topology):
            self.open(topology, *data.draw(st.sampled_from(self.saved)))

        @precondition(lambda self: self.saved and self.has_begun)
        @rule(data=st.data())
        def restore_again(self, data):
            """Another state comes too late, and changes nothing."""
            state, _ = data.draw(st.sampled_from(self.saved))
            for loader in self.run.loaders:
                with pytest.raises(ConfigError, match="in a new loader"):
                    loader.load_state_dict(json.loads(state))

        @precondition(lambda self: self.saved and not self.has_begun)
        @rule(data=st.data(), seed=st.integers(0, 2**32))
        def damage(self, data, seed):
            """A state that was damaged is refused by every rank, and changes nothing."""
            text, _ = data.draw(st.sampled_from(self.saved))
            for loader in self.run.loaders:
                with pytest.raises((StateFormatError, StateMismatchError)):
                    loader.load_state_dict(damaged(text, random.Random(seed)))

    return Machine


def damaged(text, rng):
    """A state with one number, truth or text in it changed, one key lost, or a list cut."""
    state = json.loads(text)
    place, spots = state, []
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = rng.choice(keys)
        spots.append((place, key))
        if not isinstance(place[key], (dict, list)) or not place[key]:
            break
        place = place[key]
    place, key = rng.choice(spots)
    old = place[key]
    if isinstance(old, bool) or old is None:
        place[key] = 1
    elif isinstance(old, (int, float)):
        place[key] = old + rng.choice([-1, 1, 1000])
    elif isinstance(old, str):
        place[key] = old + "x"
    else:
        del place[key]
    return state


def run_machine(mix, steps, examples, length):
    options = settings(
        max_examples=examples,
        stateful_step_count=length,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        derandomize=True,
        database=None,
    )
    run_state_machine_as_test(machine(mix, steps), settings=options)


def test_any_order_of_draws_saves_restores_and_damage_reads_what_a_list_would(mix, steps):
    run_machine(mix, steps, examples=15, length=20)


@pytest.mark.nightly
def test_two_thousand_long_orders_read_what_a_list_would(mix, steps):
    run_machine(mix, steps, examples=2000, length=100)
