# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause

import json
import math
from collections import Counter

import numpy as np
import pytest

from energon_ext.errors import ConfigError, StateFormatError
from energon_ext.mixture.choosers import RandomChooser
from energon_ext.weights import weight_from_config

WEIGHTS = {"a": {"linear": {0: 0, 1000: 10}}, "b": {"step": {0: 4, 500: 0}}, "c": 1}


def chooser(weights=WEIGHTS, seed=7):
    specs = [weight_from_config(value) for value in weights.values()]
    return RandomChooser(list(weights), specs, seed=seed)


def test_draws_follow_the_weights_at_every_index():
    draws = 40_000
    for index, expected in (
        (0, (0, 0.8, 0.2)),
        (250, (1 / 3, 8 / 15, 2 / 15)),
        (500, (5 / 6, 0, 1 / 6)),
    ):
        chosen = chooser(seed=index)
        counts = Counter(chosen.choose(index) for _ in range(draws))
        for key, probability in zip("abc", expected):
            sigma = math.sqrt(draws * probability * (1 - probability))
            assert abs(counts[key] - draws * probability) <= 5 * sigma


@pytest.mark.parametrize("num_sources", [2, 30, 1000])
def test_a_million_draws_follow_the_schedules_in_every_window(num_sources):
    """Steep and flat, within and across the windows that the chooser looks at together."""
    kinds = ("linear", "step", "cosine", "constant")
    weights = {}
    for number in range(num_sources):
        kind = kinds[number % 4]
        points = {100: 1 + number % 7, 500: (number + 1) % 3, 900: 2}
        weights[f"s{number:04d}"] = 1.5 if kind == "constant" else {kind: points}
    chosen = chooser(weights)
    draws = 1000  # at each of 1000 indices
    for start in range(0, 1000, 100):
        indices = np.arange(start, start + 100)
        counts = Counter(chosen.choose(int(index)) for index in indices for _ in range(draws))
        table = np.stack([weight.evaluate_many(indices) for weight in chosen.weights.values()])
        shares = table / table.sum(0)
        mean, variance = draws * shares.sum(1), draws * (shares * (1 - shares)).sum(1)
        for key, expected, spread in zip(chosen.keys, mean, variance):
            assert abs(counts[key] - expected) <= 5 * math.sqrt(spread) + 1e-9
            if expected == 0:
                assert counts[key] == 0


def test_a_source_of_weight_zero_is_never_drawn_from_the_first_index_on():
    chosen = chooser()
    assert "b" not in {chosen.choose(index) for index in range(500, 1500)}
    assert "a" not in {chosen.choose(0) for _ in range(1000)}


def test_the_order_of_the_keys_says_nothing():
    forwards, backwards = chooser(), chooser(dict(reversed(WEIGHTS.items())))
    assert [forwards.choose(i) for i in range(300)] == [backwards.choose(i) for i in range(300)]


def test_another_seed_is_another_order():
    orders = []
    for seed in (1, 2, 1):
        chosen = chooser(seed=seed)
        orders.append([chosen.choose(300) for _ in range(50)])
    assert orders[0] == orders[2] != orders[1]


def test_a_state_continues_at_every_draw_through_json():
    straight = chooser()
    expected = []
    states = []
    for index in range(1200):
        states.append(json.dumps(straight.save_state()))
        key = straight.choose(index)
        straight.consume(key, index)
        expected.append(key)
    for position in (0, 1, 600, 1023, 1024, 1025, 1199):
        resumed = chooser()
        resumed.restore_state(json.loads(states[position]))
        assert [resumed.choose(i) for i in range(position, 1200)] == expected[position:]
    last = chooser()
    last.restore_state(json.loads(states[-1]))
    assert sum(last.counts.values()) == sum(range(1199))


def test_the_state_does_not_grow_with_what_was_drawn():
    chosen = chooser()
    short = len(json.dumps(chosen.save_state()))
    for _ in range(5000):
        chosen.choose(300)
    assert len(json.dumps(chosen.save_state())) <= short + 4


def test_a_dropped_source_leaves_and_comes_back():
    chosen = chooser()
    chosen.drop("c")
    assert "c" not in {chosen.choose(300) for _ in range(500)}
    chosen.revive()
    assert "c" in {chosen.choose(300) for _ in range(500)}


def test_nothing_to_draw_is_an_error_that_names_the_index_and_the_weights():
    chosen = chooser({"a": {"step": {0: 1, 40: 0}}, "b": 0})
    with pytest.raises(ConfigError, match=r"batch index 40.*'a'.*step.*'b'"):
        chosen.choose(40)
    chosen.drop("a")
    chosen.drop("b")
    with pytest.raises(ConfigError, match="Every source has ended"):
        chosen.choose(40)


def test_a_state_of_another_version_is_refused():
    with pytest.raises(StateFormatError, match="version 99"):
        chooser().restore_state({**chooser().save_state(), "version": 99})


@pytest.mark.parametrize(("keys", "weights"), [([], None), (["a", "a"], None), (["a"], [1, 2])])
def test_keys_and_weights_must_fit(keys, weights):
    with pytest.raises(ConfigError):
        RandomChooser(keys, weights)
