# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause

import math
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st
from megatron.energon.epathlib import EPath

from energon_ext.config.yaml_file import read_mapping
from energon_ext.errors import ConfigError
from energon_ext.weights import (
    ConstantWeight,
    ScheduledWeight,
    Weights,
    weight_from_config,
)
from energon_ext.weights.schedule import KINDS


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (7, {0: 7, 10**9: 7}),
        (
            {"step": {0: 100, 100: 10, 1000: 0}},
            {0: 100, 99: 100, 100: 10, 999: 10, 1000: 0, 5000: 0},
        ),
        ({"step": {"10": 2, "20": 3}}, {0: 2, 10: 2, 19: 2, 20: 3}),
        ({"linear": {0: 100, 100: 0}}, {0: 100, 50: 50, 75: 25, 100: 0, 1000: 0}),
        ({"linear": [[20, 4], [10, 2]]}, {0: 2, 10: 2, 15: 3, 20: 4, 30: 4}),
        ({"cosine": {0: 0, 100: 8}}, {0: 0, 25: 8 * 0.14644660940672627, 50: 4, 100: 8, 101: 8}),
        ({"exponential": {0: 1, 4: 16}}, {0: 1, 1: 2, 2: 4, 3: 8, 4: 16, 9: 16}),
    ],
)
def test_a_weight_has_the_values_worked_out_by_hand(config, expected):
    weight = weight_from_config(config)
    together = Weights([ConstantWeight(3), weight])
    for position, value in expected.items():
        assert weight.evaluate(position) == pytest.approx(value, abs=1e-12)
        assert together.at(position).tolist() == [3, weight.evaluate(position)]


@pytest.mark.parametrize(
    ("config", "found"),
    [
        (-1, "-1"),
        (True, "True"),
        (math.inf, "inf"),
        (math.nan, "nan"),
        (None, "None"),
        ("0x10", "'0x10'"),
        ([], "[]"),
        ({}, "[]"),
        ({"step": {0: 1}, "linear": {0: 1}}, "['step', 'linear']"),
        ({"sigmoid": {0: 1}}, "'sigmoid'"),
        ({"step": {}}, "no breakpoints"),
        ({"step": 3}, "3 found"),
        ({"step": {-1: 1}}, "-1"),
        ({"step": {"a": 1}}, "'a'"),
        ({"step": {1.5: 1}}, "1.5"),
        ({"step": {"1.0005k": 1}}, "'1.0005k'"),
        ({"step": {"1__0": 1}}, "'1__0'"),
        ({"step": {"10 k": 1}}, "'10 k'"),
        ({"step": {"10K": 1}}, "'10K'"),
        ({"step": {"1e-3": 1}}, "'1e-3'"),
        ({"step": {"1e400": 1}}, "'1e400'"),
        ({"step": {"\N{SUPERSCRIPT TWO}": 1}}, "an integer from 0 to 1e+36, such as"),
        ({"step": {"9" * 5000: 1}}, "an integer from 0 to 1e+36, such as"),
        ({"step": [[math.inf, 1]]}, "inf"),
        ({"linear": {0: float("1e400")}}, "inf is not a finite number"),
        ({"linear": [[0, 1], [0, 2]]}, "breakpoint 0 is given twice"),
        ({"linear": {"0": 1, "00": 2}}, "breakpoint 0 is given twice"),
        ({"linear": {"1000": 1, "1k": 2}}, "breakpoint 1000 is given twice"),
        ({"linear": [[0, 1, 2]]}, "[[0, 1, 2]]"),
        ({"linear": {0: -3}}, "-3"),
        ({"linear": {0: True}}, "True"),
        ({"exponential": {0: 1, 5: 0}}, "a ratio never reaches 0"),
    ],
)
def test_a_wrong_weight_is_an_error_that_says_where_and_what(config, found):
    with pytest.raises(ConfigError) as error:
        weight_from_config(config, "mix.yaml: blend[2].weight")
    assert "mix.yaml: blend[2].weight" in str(error.value)
    assert found in str(error.value)


def test_weights_are_equal_only_where_every_part_is():
    """In full: as they are shown, with six digits, 1234567 and 1234568 are one number."""
    step = weight_from_config({"step": {0: 1, 9: 1234567}})
    others = [
        {"step": {0: 1, 9: 1234568}},
        {"step": {0: 1, 10: 1234567}},
        {"linear": {0: 1, 9: 1234567}},
        {"step": {9: 1234567}},
        1234567,
    ]
    same = weight_from_config({"step": [[9, 1234567.0], ["0", 1]]})
    assert step == same and hash(step) == hash(same)
    assert [weight_from_config(other) == step for other in others] == [False] * 5
    assert len({step, same, *map(weight_from_config, others)}) == 6
    assert ConstantWeight(1234567) == ConstantWeight(1234567.0) != ConstantWeight(1234568)


def test_only_what_the_user_wrote_as_a_schedule_counts_as_scheduled():
    assert weight_from_config({"step": {0: 1}}).is_scheduled
    assert not weight_from_config(1).is_scheduled
    assert weight_from_config({"linear": {5: 1, 70: 0}}).breakpoints() == (5, 70)
    assert weight_from_config(1).breakpoints() == ()


def test_a_weight_is_shown_as_the_user_wrote_it():
    assert repr(weight_from_config({"linear": {"10": 0.5, 0: 2}})) == "linear{0: 2, 10: 0.5}"
    assert repr(weight_from_config(3)) == "3"


def test_an_error_without_a_place_names_the_weight():
    """Every kind is listed, and a breakpoint is a number also with its sign."""
    kinds = "step, linear, cosine, exponential"
    for make, message in [
        (lambda: ConstantWeight(-1), "weight: -1 is not a finite number >= 0."),
        (lambda: weight_from_config(-1), "weight: -1 is not a finite number >= 0."),
        (lambda: ConstantWeight(1e308), "weight: 1e+308 is not a finite number <= 1e+15 and >= 0."),
        (lambda: weight_from_config({}), f"weight: [] found, exactly one of {kinds} is needed."),
        (lambda: ScheduledWeight("x", {0: 1}), f"weight: 'x' found, one of {kinds} is needed."),
        (
            lambda: ScheduledWeight("step", {"-3": 1}),
            "weight.step: breakpoint '-3' is not an integer from 0 to 1e+36, such as 1000, 1_000, "
            "10k, 2.5M, 40B, 1T or 1e9.",
        ),
    ]:
        with pytest.raises(ConfigError) as error:
            make()
        assert str(error.value) == message


def test_a_breakpoint_may_be_a_text_with_a_sign():
    weight = ScheduledWeight("step", {"0": 1, " +10 ": 5})
    assert [weight.evaluate(position) for position in (9, 10)] == [1, 5]


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("40B", 40_000_000_000),
        ("2.5M", 2_500_000),
        ("10k", 10_000),
        ("0.001k", 1),
        ("15T", 15 * 10**12),
        ("1e9", 10**9),
        ("1.5e3", 1500),
        ("1_000", 1000),
        (1e9, 10**9),
        ("1.000000000000000000000000000001e30", 10**30 + 1),  # no float in between
    ],
)
def test_a_breakpoint_may_be_written_as_people_write_large_numbers(text, count):
    assert ScheduledWeight("step", [[text, 1]]).breakpoints() == (count,)


def test_breakpoints_with_units_are_read_from_a_yaml_file(tmp_path):
    (tmp_path / "w.yaml").write_text("a: {linear: {0: 1, 2.5M: 3, 1_0M: 5}}\nb: {step: [[1e3, 2]]}")
    read = read_mapping(EPath(tmp_path / "w.yaml"))
    weights = [weight_from_config(read[name]) for name in "ab"]
    assert [weight.breakpoints() for weight in weights] == [(0, 2_500_000, 10_000_000), (1000,)]


def test_an_exponential_of_three_hundred_decades_has_a_value_everywhere():
    """Halfway between 1e-300 and 1e14 in logarithms is 1e-143."""
    for low, high in ((1e-300, 1e14), (1e14, 1e-300)):
        weight = ScheduledWeight("exponential", {0: low, 1000: high})
        values = [weight.evaluate(position) for position in range(1001)]
        assert values[0] == low and values[-1] == high
        assert values[500] == pytest.approx(1e-143, rel=1e-10)
        assert values == sorted(values, reverse=low > high)


def test_a_cosine_over_ten_to_the_thirty_positions_is_followed_to_the_position():
    """sin^2(x) is x^2 for a small x."""
    end = 10**30
    weight = ScheduledWeight("cosine", {0: 0, end: 1, 2 * end: 1, 2 * end + 1000: 0})
    assert weight.evaluate(1) == pytest.approx((math.pi / 2 / 1e30) ** 2)
    assert weight.evaluate(10**28) == pytest.approx(math.sin(math.pi / 200) ** 2)
    assert weight.evaluate(2 * end + 500) == pytest.approx(0.5)
    assert weight.evaluate(2 * end + 250) == pytest.approx(0.8535533905932737)


@given(
    st.sampled_from(list(KINDS)),
    st.tuples(st.integers(0, 99), st.integers(0, 30)).map(lambda at: (at[0], 2 + 10 ** at[1])),
    st.sampled_from([(0.0, 1.0), (1.0, 0.0), (0.0, 1e15), (3.7, 0.0), (1e15, 2.0), (1e-9, 1e15)]),
)
def test_a_weight_is_monotone_and_zero_nowhere_or_everywhere_between_breakpoints(kind, at, values):
    """The rule that the checks of a mixture rely on, at both ends and between them."""
    left, width = at
    low, high = (max(value, 1e-12) if KINDS[kind].is_ratio else value for value in values)
    weight = ScheduledWeight(kind, {left: low, left + width: high})
    inside = {left + 1, left + 1 + width // 3, left + width // 2, left + width - 1}
    found = [weight.evaluate(position) for position in (left, *sorted(inside), left + width)]
    assert found == sorted(found, reverse=low > high)
    assert len({value == 0 for value in found[1:-1]}) == 1
    assert (found[0], found[-1]) == (low, high)


def test_no_weights_have_no_values_at_every_position():
    assert [Weights([]).at(position).tolist() for position in (0, 7)] == [[], []]


def test_a_weight_survives_a_pickle():
    for config in (3, {"cosine": {0: 1, 40: 7}}):
        weight = weight_from_config(config)
        assert pickle.loads(pickle.dumps(weight)) == weight


points = st.dictionaries(st.integers(0, 60), st.floats(0.125, 8), min_size=1, max_size=6)


@given(st.lists(st.tuples(st.sampled_from(list(KINDS)), points), min_size=1, max_size=5), st.data())
def test_many_weights_at_once_are_what_each_is_alone_in_whatever_order_positions_come(parts, data):
    """What is kept from the position before must not show: a run goes on, resumes, looks back."""
    specs = [ScheduledWeight(kind, points) for kind, points in parts]
    specs.append(ConstantWeight(2))
    together = Weights(specs)
    for position in data.draw(st.lists(st.integers(0, 80), min_size=1, max_size=30)):
        assert together.at(position).tolist() == [spec.evaluate(position) for spec in specs]


@given(st.sampled_from(list(KINDS)), points)
def test_a_weight_is_what_the_formula_of_its_kind_says(kind, points):
    """An independent reading of the table in the module: plain Python, one position at a time."""
    weight = ScheduledWeight(kind, points)
    breakpoints = sorted(points)
    for position in range(breakpoints[0], breakpoints[-1]):
        left = max(point for point in breakpoints if point <= position)
        right = min(point for point in breakpoints if point > position)
        low, high = points[left], points[right]
        t = (position - left) / (right - left)
        expected = {
            "step": low,
            "linear": low + t * (high - low),
            "cosine": low + (high - low) * (1 - math.cos(math.pi * t)) / 2,
            "exponential": low * (high / low) ** t,
        }[kind]
        assert weight.evaluate(position) == pytest.approx(expected, rel=1e-12)
    assert weight.evaluate(breakpoints[-1]) == points[breakpoints[-1]]


@given(st.sampled_from(list(KINDS)), points)
def test_a_weight_stays_between_the_values_around_it(kind, points):
    weight = ScheduledWeight(kind, points)
    breakpoints = sorted(points)
    for left, right in zip(breakpoints, breakpoints[1:]):
        low, high = sorted((points[left], points[right]))
        for position in range(left, right + 1):
            assert low * (1 - 1e-12) <= weight.evaluate(position) <= high * (1 + 1e-12)
    for outside in (0, breakpoints[0]):
        assert weight.evaluate(outside) == points[breakpoints[0]]
    for outside in (breakpoints[-1], 10**12):
        assert weight.evaluate(outside) == points[breakpoints[-1]]
