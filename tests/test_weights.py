# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause

import math
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon_ext.errors import ConfigError
from energon_ext.weights import (
    KINDS,
    ConstantWeight,
    ScheduleAxis,
    ScheduledFloat,
    ScheduledWeight,
    WeightGroup,
    as_weight,
    compose_weights,
    eval_weight,
    weight_from_config,
    without_common_total,
)


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
    for batch_index, value in expected.items():
        assert weight.evaluate(batch_index) == pytest.approx(value, abs=1e-12)
        assert eval_weight(weight, batch_index) == weight.evaluate(batch_index)
    many = weight.evaluate_many(np.array(list(expected)))
    assert many.tolist() == pytest.approx(list(expected.values()), abs=1e-12)


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
        ({"step": {}}, "no knots"),
        ({"step": 3}, "3 found"),
        ({"step": {-1: 1}}, "-1"),
        ({"step": {"a": 1}}, "'a'"),
        ({"step": {1.5: 1}}, "1.5"),
        ({"linear": [[0, 1], [0, 2]]}, "knot 0 stands twice"),
        ({"linear": {"0": 1, "00": 2}}, "knot 0 stands twice"),
        ({"linear": [[0, 1, 2]]}, "[[0, 1, 2]]"),
        ({"linear": {0: -3}}, "-3"),
        ({"linear": {0: True}}, "True"),
        ({"exponential": {0: 1, 5: 0}}, "cannot be reached"),
    ],
)
def test_a_wrong_weight_is_an_error_that_says_where_and_what(config, found):
    with pytest.raises(ConfigError) as error:
        weight_from_config(config, "mix.yaml: blend[2].weight")
    assert "mix.yaml: blend[2].weight" in str(error.value)
    assert found in str(error.value)


def test_a_product_with_a_constant_scales_the_schedule():
    falling = weight_from_config({"linear": {0: 10, 5: 0}})
    for product in (compose_weights(falling, 0.5), compose_weights(0.5, falling)):
        assert [product.evaluate(i) for i in (0, 5)] == [5, 0]
    assert compose_weights(3, 4) == ConstantWeight(12)
    assert compose_weights(weight_from_config({"exponential": {0: 1, 2: 4}}), 0).evaluate(1) == 0


def test_a_schedule_inside_a_schedule_is_refused_unless_it_is_meant():
    outer = WeightGroup([weight_from_config({"step": {0: 1, 9: 2}})]).share(0, "a.yaml: blend[0]")
    inner = WeightGroup([weight_from_config({"linear": {0: 1, 9: 2}})]).share(0, "b.yaml: blend[3]")
    with pytest.raises(ConfigError, match=r"a\.yaml: blend\[0\].*b\.yaml: blend\[3\]"):
        compose_weights(outer, inner)
    assert compose_weights(outer, inner, allow_nested_schedules=True).evaluate(0) == 1


def test_shares_are_normalised_at_each_index():
    specs = [weight_from_config(c) for c in ({"linear": {0: 0, 10: 6}}, 2)]
    shares = [WeightGroup(specs).share(i) for i in range(2)]
    # At 0: 0 of 2; at 5: 3 of 5; at 10: 6 of 8.
    for index, expected in ((0, 0.0), (5, 0.6), (10, 0.75), (5, 0.6)):
        assert shares[0].evaluate(index) == pytest.approx(expected)
        assert shares[1].evaluate(index) == pytest.approx(1 - expected)
    many = shares[0].evaluate_many(np.array([0, 5, 10]))
    assert many.tolist() == pytest.approx([0, 0.6, 0.75])
    # Only what the user scheduled counts as scheduled.
    assert shares[0].is_scheduled
    assert not shares[1].is_scheduled


def test_a_group_without_weight_has_no_shares():
    shares = [WeightGroup([ConstantWeight(0), ConstantWeight(0)]).share(i) for i in range(2)]
    assert [share.evaluate(3) for share in shares] == [0, 0]
    assert shares[0].evaluate_many(np.array([1, 2])).tolist() == [0, 0]


points = st.dictionaries(st.integers(0, 60), st.floats(0.125, 8), min_size=1, max_size=6)


@given(st.sampled_from(KINDS), points, st.integers(0, 80), st.integers(0, 40))
def test_bounds_hold_and_are_reached(kind, points, first, length):
    weight = ScheduledWeight.from_points(kind, points)
    low, high = weight.bounds(first, first + length)
    values = [weight.evaluate(index) for index in range(first, first + length + 1)]
    assert low == min(values)
    assert high == max(values)


@given(points, points, points, st.integers(0, 60), st.integers(0, 30))
def test_bounds_hold_for_shares_products_and_other_axes(one, two, three, first, length):
    specs = [ScheduledWeight.from_points("linear", points) for points in (one, two, three)]
    group = WeightGroup([*specs, ConstantWeight(0)])
    product = compose_weights(group.share(0), specs[1], allow_nested_schedules=True)
    axis = ScheduleAxis.steps(3, lookahead_batches=2)
    for weight in (*map(group.share, range(4)), product, axis.restate(product)):
        low, high = weight.bounds(first, first + length)
        for index in range(first, first + length + 1):
            assert low * (1 - 1e-12) <= weight.evaluate(index) <= high * (1 + 1e-12)


def test_knots_may_count_optimizer_steps_or_tokens():
    falling = weight_from_config({"linear": {0: 10, 10: 0}})
    steps = ScheduleAxis.steps(batches_per_step=4).restate(falling)
    # Four micro-batches of one optimizer step have one weight.
    assert [steps.evaluate(i) for i in range(9)] == [10] * 4 + [9] * 4 + [8]
    assert steps.evaluate_many(np.array([3, 4, 39, 40])).tolist() == [10, 9, 1, 0]
    assert steps.knots() == (0, 40)
    switch = weight_from_config({"step": {0: 1, 1000: 0}})
    tokens = ScheduleAxis.tokens(tokens_per_batch=300).restate(switch)
    # Batch 3 begins at token 900, batch 4 at 1200.
    assert [tokens.evaluate(i) for i in (0, 3, 4)] == [1, 1, 0]
    assert tokens.knots() == (0, 4)
    ahead = ScheduleAxis(lookahead_batches=12).restate(switch)
    assert [ahead.evaluate(i) for i in (987, 988)] == [1, 0]
    assert ahead.knots() == (0, 988)
    assert ScheduleAxis().restate(falling) is falling
    with pytest.raises(ConfigError, match="batches: 0 found"):
        ScheduleAxis.steps(0)


def test_weights_compare_the_same_without_their_common_total():
    schedule = weight_from_config({"linear": {0: 1, 10: 5}})
    inner = WeightGroup([ConstantWeight(1), ConstantWeight(3)])
    outer = WeightGroup([schedule, ConstantWeight(2)])
    full = [
        outer.share(0),
        compose_weights(outer.share(1), inner.share(0)),
        compose_weights(outer.share(1), inner.share(1)),
    ]
    lean = without_common_total(full)
    assert lean[0] is schedule
    assert [weight.knots() for weight in lean[1:]] == [(), ()]
    for index in (0, 3, 10):
        total = schedule.evaluate(index) + 2
        expected = [schedule.evaluate(index) / total, 0.5 / total, 1.5 / total]
        assert [weight.evaluate(index) for weight in full] == pytest.approx(expected)
        assert [w.evaluate(index) / total for w in lean] == pytest.approx(expected)
    assert without_common_total([full[0], ConstantWeight(1)]) == [full[0], ConstantWeight(1)]


@given(st.sampled_from(KINDS), points)
def test_one_by_one_and_all_at_once_agree(kind, points):
    weight = ScheduledWeight.from_points(kind, points)
    indices = np.arange(80)
    np.testing.assert_allclose(
        weight.evaluate_many(indices), [weight.evaluate(int(i)) for i in indices], rtol=1e-12
    )


@given(st.sampled_from(KINDS), points)
def test_a_weight_stays_between_the_values_around_it(kind, points):
    weight = ScheduledWeight.from_points(kind, points)
    knots = sorted(points)
    for left, right in zip(knots, knots[1:]):
        low, high = sorted((points[left], points[right]))
        for index in range(left, right + 1):
            assert low * (1 - 1e-12) <= weight.evaluate(index) <= high * (1 + 1e-12)


def test_a_float_carries_its_schedule_through_stock_arithmetic_and_a_pickle():
    weight = ScheduledFloat(weight_from_config({"step": {0: 6, 10: 2}}))
    carried = pickle.loads(pickle.dumps(3.0 * weight / 2.0))
    assert isinstance(carried, float)
    assert [as_weight(carried).evaluate(i) for i in (0, 10)] == [9, 3]


def test_a_float_that_carries_a_schedule_never_becomes_a_number_in_silence():
    with pytest.raises(ConfigError, match="DynamicBlendMixin"):
        float(ScheduledFloat(weight_from_config({"step": {0: 6, 10: 2}})))
