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
    WeightSpec,
    weight_from_config,
)
from energon_ext.weights.schedule import KINDS
from tests.weights.slow import slow_weight


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
def test_weights_have_known_values(config, expected):
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
def test_a_wrong_weight_is_reported_with_its_place(config, found):
    with pytest.raises(ConfigError) as error:
        weight_from_config(config, "mix.yaml: blend[2].weight")
    assert "mix.yaml: blend[2].weight" in str(error.value)
    assert found in str(error.value)


def test_weights_are_equal_only_if_every_part_is():
    """In full precision: 1234567 and 1234568 look the same when shown with six digits."""
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


def test_only_schedules_are_scheduled_and_have_breakpoints():
    assert weight_from_config({"step": {0: 1}}).is_scheduled
    assert not weight_from_config(1).is_scheduled
    assert weight_from_config({"linear": {5: 1, 70: 0}}).breakpoints() == (5, 70)
    assert weight_from_config(1).breakpoints() == ()


def test_a_weight_is_shown_as_the_user_wrote_it():
    assert repr(weight_from_config({"linear": {"10": 0.5, 0: 2}})) == "linear{0: 2, 10: 0.5}"
    assert repr(weight_from_config(3)) == "3"


def test_an_error_without_a_place_says_weight():
    """It lists every kind, and how breakpoints are written."""
    kinds = "step, linear, cosine, exponential"
    for make, message in [
        (lambda: ConstantWeight(-1), "weight: -1 is not a finite number >= 0."),
        (lambda: weight_from_config(-1), "weight: -1 is not a finite number >= 0."),
        (lambda: ConstantWeight(1e308), "weight: 1e+308 is not a finite number <= 1e+15 and >= 0."),
        (lambda: weight_from_config({}), f"weight: [] found, exactly one of {kinds} is needed."),
        (
            lambda: weight_from_config({"kind": "linear", "points": {0: 1, 9: 2}}, "a.weight"),
            "a.weight: ['kind', 'points'] found, write {linear: {0: 1, 9: 2}}.",
        ),
        (
            lambda: WeightSpec({"linear": {0: 1}}),
            "WeightSpec(...): use WeightSpec.from_config({'linear': {0: 3, 100: 1}}), "
            "ConstantWeight(3) or ScheduledWeight('linear', {0: 3, 100: 1}).",
        ),
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
        ("1.000000000000000000000000000001e30", 10**30 + 1),  # not representable as a float
    ],
)
def test_a_breakpoint_may_have_a_unit(text, count):
    assert ScheduledWeight("step", [[text, 1]]).breakpoints() == (count,)


def test_breakpoints_with_units_are_read_from_a_yaml_file(tmp_path):
    (tmp_path / "w.yaml").write_text("a: {linear: {0: 1, 2.5M: 3, 1_0M: 5}}\nb: {step: [[1e3, 2]]}")
    read = read_mapping(EPath(tmp_path / "w.yaml"))
    weights = [weight_from_config(read[name]) for name in "ab"]
    assert [weight.breakpoints() for weight in weights] == [(0, 2_500_000, 10_000_000), (1000,)]


def test_an_exponential_spans_three_hundred_decades():
    """Halfway between 1e-300 and 1e14 in logarithms is 1e-143."""
    for low, high in ((1e-300, 1e14), (1e14, 1e-300)):
        weight = ScheduledWeight("exponential", {0: low, 1000: high})
        values = [weight.evaluate(position) for position in range(1001)]
        assert values[0] == low and values[-1] == high
        assert values[500] == pytest.approx(1e-143, rel=1e-10)
        assert values == sorted(values, reverse=low > high)


def test_a_cosine_over_1e30_positions_is_exact():
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
def test_a_weight_is_monotone_and_never_partly_zero_between_breakpoints(kind, at, values):
    """The checks of a mixture rely on this rule."""
    left, width = at
    low, high = (max(value, 1e-12) if KINDS[kind].is_ratio else value for value in values)
    weight = ScheduledWeight(kind, {left: low, left + width: high})
    inside = {left + 1, left + 1 + width // 3, left + width // 2, left + width - 1}
    found = [weight.evaluate(position) for position in (left, *sorted(inside), left + width)]
    assert found == sorted(found, reverse=low > high)
    assert len({value == 0 for value in found[1:-1]}) == 1
    assert (found[0], found[-1]) == (low, high)


def test_an_empty_list_of_weights_has_no_values():
    assert [Weights([]).at(position).tolist() for position in (0, 7)] == [[], []]


def test_a_weight_survives_a_pickle():
    for config in (3, {"cosine": {0: 1, 40: 7}}):
        weight = weight_from_config(config)
        assert pickle.loads(pickle.dumps(weight)) == weight


points = st.dictionaries(st.integers(0, 60), st.floats(0.125, 8), min_size=1, max_size=6)


@given(st.lists(st.tuples(st.sampled_from(list(KINDS)), points), min_size=1, max_size=5), st.data())
def test_weights_together_equal_each_alone_in_any_order_of_positions(parts, data):
    """Cached values of an earlier position must not affect the result."""
    specs = [*(ScheduledWeight(kind, points) for kind, points in parts), ConstantWeight(2)]
    together = Weights(specs)
    for position in data.draw(st.lists(st.integers(0, 80), min_size=1, max_size=30)):
        assert together.at(position).tolist() == [spec.evaluate(position) for spec in specs]


@given(st.sampled_from(list(KINDS)), points)
def test_a_weight_follows_the_formula_of_its_kind(kind, points):
    """Also before the first and after the last breakpoint."""
    weight = ScheduledWeight(kind, points)
    for position in (*range(max(points) + 2), 10**12):
        expected = slow_weight(kind, points, position)
        assert weight.evaluate(position) == pytest.approx(expected, rel=1e-12)
        if position in points:
            assert weight.evaluate(position) == points[position]
