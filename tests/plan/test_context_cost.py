# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The time of micro-batches, fitted to measured times."""

import json

import numpy as np
import pytest

from energon_ext import ConfigError
from energon_ext.plan.context_cost import ContextTime, MeasuredCost, load_context_times

LENGTHS = [[16], [64], [256], [16] * 4, [64, 128]]


def seconds(lengths, size, overhead=0.5, linear=0.25, quadratic=0.125):
    pairs = sum(n * (n + 1) / 2 for n in lengths)
    return overhead + (linear * sum(lengths) + quadratic * pairs) / size


def times(sizes=(1, 2), noise=0.0, **numbers):
    random = np.random.default_rng(0)
    return [
        ContextTime(
            context_size=size,
            lengths=lengths,
            seconds=seconds(lengths, size, **numbers) * (1 + noise * random.uniform(-1, 1)),
        )
        for size in sizes
        for lengths in LENGTHS
    ]


def test_a_fit_finds_what_the_times_were_made_of():
    cost = MeasuredCost.fit(times())
    assert cost.to_json() == [[1, 0.5, 0.25, 0.125], [2, 0.5, 0.125, 0.0625]]
    assert cost(np.array([4, 2]), 2).tolist() == [0.125 * 4 + 0.0625 * 10, 0.125 * 2 + 0.0625 * 3]
    assert max(cost.errors.values()) < 1e-8 and cost.longest == {1: 256, 2: 256}


def test_a_fit_has_no_negative_number_and_beats_its_neighbours():
    """Compared with a search around it, of the same sum of squared relative errors."""
    measured = times(noise=0.3, quadratic=0.0, overhead=0.0)
    cost = MeasuredCost.fit(measured)

    def error(size, overhead, linear, quadratic):
        return sum(
            (seconds(each.lengths, 1, overhead, linear, quadratic) / each.seconds - 1) ** 2
            for each in measured
            if each.context_size == size
        )

    for size, *numbers in cost.to_json():
        assert min(numbers) >= 0
        best = error(size, *numbers)
        for index, step in [(i, s) for i in range(3) for s in (-0.01, 0.01)]:
            moved = list(numbers)
            moved[index] = max(0.0, moved[index] + step * max(0.01, moved[index]))
            assert error(size, *moved) >= best * (1 - 1e-9)


def test_a_size_that_was_not_measured_is_refused():
    with pytest.raises(ConfigError, match="no time was measured on 4 ranks, only on 1, 2"):
        MeasuredCost.fit(times()).overhead(4)


def test_too_few_measurements_are_refused():
    with pytest.raises(ConfigError, match="context_size 2: fewer than three different"):
        MeasuredCost.fit([*times((1,)), *times((2,))[:2]])


def test_times_are_loaded_from_a_file(tmp_path):
    path = tmp_path / "times.jsonl"
    path.write_text("\n".join(json.dumps(each.to_json()) for each in times()) + "\n\n")
    assert load_context_times(path) == times()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no measured times"),
        ("[1]", "line 1: '\\[1\\]' is not a measured time"),
        ('{"context_size": 0, "lengths": [1], "seconds": 1}', "context_size: 0 found"),
        ('{"context_size": 1, "lengths": [], "seconds": 1}', "lengths: \\[\\] found"),
        ('{"context_size": 1, "lengths": [0], "seconds": 1}', "lengths: 0 found"),
        ('{"context_size": 1, "lengths": [1], "seconds": 0}', "seconds: 0 found"),
        ('{"context_size": 1, "lengths": [1], "seconds": NaN}', "is not a measured time"),
        ('{"context_size": 1, "lengths": [1]}', "missing"),
        ('{"context_size": 1, "lengths": [1], "seconds": 1, "more": 2}', "more"),
    ],
)
def test_a_bad_file_is_refused_with_its_line(tmp_path, text, message):
    path = tmp_path / "times.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_context_times(path)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"none.jsonl: cannot be read"):
        load_context_times(tmp_path / "none.jsonl")
