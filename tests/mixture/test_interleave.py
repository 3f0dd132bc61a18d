# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Interleaves against the integral of the scheduled shares, summed in plain Python.

What is known of the rule for rows of one length, in rows, ``n`` members: where shares stay, no
credit leaves ``+-(1 - 1 / (2 n - 2))`` (Tijdeman, "The chairman assignment problem", 1980), so half
a row for two members. That takes a look at what comes. Where shares move, the rule takes those of
now for those that come: no fixed number of rows holds for every schedule then, and the tests below
show what the rule keeps to.
"""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_ext.mixture.interleave import InterleaveSampler
from energon_ext.mixture.mixture import Mixture
from energon_ext.mixture.tree import INTERLEAVE, blend_of
from energon_ext.weights import ConstantWeight
from tests.mixture.slow import deviations, interleave, saved

ROUNDING = 1e-6


def furthest(configs, **options):
    """The largest deviation of any member after any row."""
    return max(max(map(abs, ahead)) for _, ahead in deviations(configs, **options))


def rows_by_step(configs, *, steps, rows):
    """``[steps, members]``, how many rows of each member a step has."""
    mixture, specs = interleave(configs)
    counts = np.zeros((steps, len(specs)), np.int64)
    for step in range(steps):
        mixture.open(step)
        drawn = mixture.draw(np.arange(step * rows, (step + 1) * rows))
        counts[step] = np.bincount(drawn, minlength=len(specs))
        mixture.settle(counts[step])
    return counts


# Shares of equal rows -----------------------------------------------------------------------------


def test_a_member_that_grows_from_nothing_gets_its_integral():
    """Regression: clocks that divide by the weight gave 0 of these 5853 rows.

    The sum over k < 1000 of 20 c / (1 + c), c = (1 - cos(pi k / 1000)) / 2, is 5852.86.
    """
    configs = [1, {"cosine": {0: 0, 1000: 1}}]
    code = [(1 - math.cos(math.pi * k / 1000)) / 2 for k in range(1000)]
    due = sum(20 * c / (1 + c) for c in code)
    assert due == pytest.approx(5852.86, abs=0.01)
    web_rows, code_rows = rows_by_step(configs, steps=1000, rows=20).sum(0)
    assert abs(code_rows - due) <= 1
    assert web_rows == 20_000 - code_rows
    assert furthest(configs, steps=1000, rows=20) <= 0.5 + ROUNDING


def test_members_that_cross_over_get_half_each():
    """Over 200 steps the falling and the rising cosine have 100.5 and 99.5 steps."""
    configs = [{"cosine": {0: 1, 200: 0}}, {"cosine": {0: 0, 200: 1}}]
    web, code = rows_by_step(configs, steps=200, rows=20).sum(0)
    assert abs(web - 2010) <= 1
    assert abs(code - 1990) <= 1
    assert furthest(configs, steps=200, rows=20) <= 0.5 + ROUNDING


def test_a_member_that_steps_up_a_hundredfold_owes_nothing_for_the_time_before():
    counts = rows_by_step([1, {"step": {0: 0.01, 100: 1}}], steps=300, rows=20)
    # 2000 rows at 1 of 101, then 10 of every 20.
    assert abs(counts[:100, 1].sum() - 2000 / 101) <= 1
    for first in range(100, 299):
        assert np.abs(counts[first : first + 2].sum(0) - 20).max() <= 1


def cosine_crossing(members):
    pairs = ({0: 1, 200: 0}, {0: 0, 200: 1})
    return [
        {"cosine": {k: (1 + m % 3) * y for k, y in pairs[m % 2].items()}} for m in range(members)
    ]


def waves(members):
    return [
        {"cosine": {k * (20 + m % 7): (m + k) % 2 * (1 + m % 5) + 0.001 for k in range(12)}}
        for m in range(members)
    ]


def steps_of_three_decades(members):
    """Every member steps over 1, .1, .01 and .001, each in an order of its own."""
    return [
        {"step": {50 * k: 10.0 ** -((m * (k + 1) + k) % 4) for k in range(6)}}
        for m in range(members)
    ]


def from_and_to_zero(members):
    """All but the first come, leave and come back, at times of their own."""
    moving = [
        {"step": {0: m % 2, 10 * m % 97 + 1: (m + 1) % 2, 120: 1, 220: 0, 230 + m % 50: 2}}
        for m in range(1, members)
    ]
    return [1, *moving]


def skewed(members):
    return [10.0 ** (-3 * m / (members - 1)) for m in range(members)]


WITHIN_ONE_ROW = [
    (cosine_crossing, (2, 3, 5, 10, 30, 100)),
    (waves, (2, 3, 5, 10, 30, 100)),
    (steps_of_three_decades, (2, 3, 5, 10)),
    (from_and_to_zero, (2, 3, 5, 10, 30, 100)),
    (skewed, (2, 3, 5, 10, 30, 100)),
]


@pytest.mark.parametrize("rows", [pytest.param(1, marks=pytest.mark.nightly), 20])
@pytest.mark.parametrize(
    ("make", "members"), [(make, members) for make, counts in WITHIN_ONE_ROW for members in counts]
)
def test_no_member_is_ever_a_row_off_its_integral(make, members, rows):
    assert furthest(make(members), steps=300, rows=rows) < 1


@pytest.mark.parametrize(("members", "rows"), [(30, 1), (30, 20), (100, 1), (100, 20)])
def test_many_members_that_all_jump_at_once_keep_to_little_more_than_a_row(members, rows):
    """Measured are .98 to 1.17: what comes after a jump is not known before it."""
    assert furthest(steps_of_three_decades(members), steps=300, rows=rows) < 1.25


def test_the_largest_credit_would_not_do():
    """It takes 12 : 12 : 3 : 1 : 1 to 30 / 29 of a row."""
    assert furthest([12, 12, 3, 1, 1], steps=30, rows=1) < 7 / 8


def test_where_nobody_has_the_credit_the_member_that_will_have_it_first_is_next():
    """It takes a quarter of a row: the first has it after 2.5 rows, the second after 3.25 / .9. The
    second is due earlier, but the rule looks only at those who have the credit."""
    sampler = InterleaveSampler(["slow", "fast", "away"], row_tokens=10)
    sampler.credits = np.array([0.0, -30.0, 30.0])
    assert sampler.pick(np.arange(1), np.array([0.1, 0.9, 0.0]), 0).tolist() == [0]


@settings(max_examples=150)
@given(st.lists(st.integers(1, 1000), min_size=1, max_size=20), st.integers(1, 9))
def test_constant_shares_keep_the_bound_of_the_chairman_assignment(weights, rows):
    bound = 1 - 1 / max(2 * len(weights) - 2, 2)
    assert furthest(weights, steps=60, rows=rows) <= bound + ROUNDING


def schedules(members, least):
    """Schedules with values over three decades, ``least`` among them."""
    values = st.one_of(st.just(least), st.floats(0.001, 1))
    kinds = st.sampled_from(["step", "linear", "cosine"])
    points = st.dictionaries(st.integers(0, 25), values, min_size=1, max_size=6)
    moving = st.builds(lambda kind, points: {kind: points}, kinds, points)
    return st.lists(moving, min_size=members[0], max_size=members[1])


@settings(max_examples=150)
@given(schedules((1, 1), least=0), st.integers(1, 9))
def test_two_members_are_never_more_than_half_a_row_off(moving, rows):
    always_there = {"linear": {0: 1, 25: 0.001}}
    assert furthest([always_there, *moving], steps=30, rows=rows) <= 0.5 + ROUNDING


@settings(max_examples=150)
@given(schedules((2, 2), least=0), st.integers(1, 9))
def test_three_members_are_never_a_row_off_also_where_they_leave_and_come_back(moving, rows):
    always_there = {"linear": {0: 1, 25: 0.001}}
    assert furthest([always_there, *moving], steps=30, rows=rows) < 1


@pytest.mark.parametrize("least", [0, 0.001])
@settings(max_examples=60)
@given(data=st.data(), rows=st.integers(1, 9))
def test_many_members_with_jumping_weights_keep_the_bound_of_the_largest_credit(least, data, rows):
    """Not proved of this rule. Random schedules came to 1.6 rows; a hill climb over them to 2.1
    with 6 members, where this is 2.28, and to 2.4 with 19, where it is 3.5."""
    moving = data.draw(schedules((2, 20), least=least))
    always_there = {"linear": {0: 1, 25: 0.001}}
    harmonic = sum(1 / k for k in range(1, len(moving) + 1))
    assert furthest([always_there, *moving], steps=30, rows=rows) < harmonic


@given(st.integers(2, 12), st.integers(0, 10**6))
def test_with_equal_weights_the_member_with_the_fewest_tokens_is_next(members, seed):
    lengths = np.random.default_rng(seed).integers(1, 10_000, 200).tolist()
    sampler = InterleaveSampler([f"s{n}" for n in range(members)])
    shares = np.full(members, 1 / members)
    got = [0] * members
    for row, length in enumerate(lengths):
        (member,) = sampler.pick(np.array([row]), shares, 0)
        assert got[member] <= min(got) + ROUNDING
        got[member] += length
        sampler.settle(shares, length * (np.arange(members) == member))


# Shares of rows that differ -----------------------------------------------------------------------


def test_rows_of_any_length_stay_within_little_more_than_the_longest():
    """One moves, one leaves at 400 and comes back at 600, one stays; rows of 1 to 10^4 tokens."""
    generator = np.random.default_rng(0)
    configs = [{"linear": {0: 1, 1000: 9}}, {"step": {0: 5, 400: 0, 600: 5}}, 2]
    last_drawn, before = [0, 0, 0], [0.0] * 3
    rows = deviations(
        configs, steps=1000, rows=20, length=lambda _: int(generator.integers(1, 10**4 + 1))
    )
    for row, (step, ahead) in enumerate(rows):
        assert max(map(abs, ahead)) <= 1.1 * 10**4
        for member in range(3):
            if ahead[member] > before[member]:  # only who is drawn gains
                last_drawn[member] = row
            is_away = member == 1 and 400 <= step <= 600
            assert is_away or row - last_drawn[member] < 200
        before = ahead


@settings(max_examples=100)
@given(schedules((2, 8), least=0.001), st.lists(st.integers(1, 10**4), min_size=1, max_size=20))
def test_rows_of_any_length_keep_to_the_harmonic_bound(moving, lengths):
    """Who is drawn has no debt, and pays one row; who is not drawn has no more than who is."""
    members, longest, taken = len(moving), max(lengths), iter(lengths * 1000)
    most_behind = longest * sum(1 / k for k in range(1, members)) + members
    for _, ahead in deviations(moving, steps=30, rows=5, length=lambda _: next(taken)):
        assert -most_behind <= min(ahead)
        assert max(ahead) <= longest + 1


def test_sources_with_1_3_and_10_tokens_a_sample_differ_by_one_sample_at_most():
    """Conformance."""
    mixture, _ = interleave([1, 1, 1], row_tokens=0)
    lengths, counts = np.array([1, 3, 10]), np.zeros(3, np.int64)
    while counts.sum() < 2500:
        mixture.open(0)
        (member,) = mixture.draw(np.array([0]))
        tokens = lengths * (np.arange(3) == member)
        mixture.settle(tokens)
        counts += tokens
        assert counts.max() - counts.min() <= 10


def test_random_draws_drift_where_credits_do_not():
    weights = {f"s{n}": ConstantWeight(1 + n) for n in range(10)}
    shares = np.arange(1, 11) / 55
    worst = {}
    for rule in (INTERLEAVE, "blend"):
        mixture = Mixture(blend_of(weights, rule), list(weights), seed="0", row_tokens=1)
        mixture.open(0)
        drawn = mixture.draw(np.arange(20_000))
        counts = np.cumsum(drawn[:, None] == np.arange(10), axis=0)
        worst[rule] = np.abs(counts - shares * np.arange(1, 20_001)[:, None]).max()
    assert worst[INTERLEAVE] < 1
    assert worst["blend"] > 20


# One at a time, many at once, and over a save -----------------------------------------------------

MOVING = [{"linear": {0: 1, 90: 9}}, {"step": {0: 1, 30: 0, 60: 1}}, {"linear": {0: 9, 90: 1}}]


@pytest.mark.parametrize("row_tokens", [1, 3])
def test_one_draw_at_a_time_is_as_many_at_once(row_tokens):
    """Shares that a float holds exactly, since rounding may turn a tie."""
    shares = np.array([0.5, 0.125, 0.375])
    together = InterleaveSampler("abc", row_tokens)
    alone = InterleaveSampler("abc", row_tokens)
    expected = together.pick(np.arange(1000), shares, 0)
    for row in range(1000):
        (member,) = alone.pick(np.array([row]), shares, 0)
        alone.settle(shares, row_tokens * (np.arange(3) == member))
        assert member == expected[row]
    together.settle(shares, row_tokens * np.bincount(expected))
    assert saved(together) == saved(alone)


@pytest.mark.parametrize("row_tokens", [0, 3])
def test_a_state_continues_at_every_step_through_json(row_tokens):
    def read(mixture, first):
        order = []
        for step in range(first, 100):
            mixture.open(step)
            drawn = mixture.draw(np.arange(3 * step, 3 * step + 3))
            order.append(drawn.tolist())
            tokens = np.bincount(drawn, weights=1 + (drawn + step) % 5, minlength=3)
            mixture.settle(tokens.astype(np.int64))
            states.append(json.dumps(saved(mixture)))
        return order

    states = []
    expected = read(interleave(MOVING, row_tokens)[0], 0)
    kept = list(states)
    for step in range(1, 100, 7):
        resumed, _ = interleave(MOVING, row_tokens)
        resumed.restore_state(json.loads(kept[step - 1]), {}, step)
        assert read(resumed, step) == expected[step:]
    assert len(kept[-1]) <= len(kept[0]) + 80  # one number a member, longer or shorter


# New, absent and renamed members ------------------------------------------------------------------


def sampler_with(credits, tokens, names="ab", renamed=None, shares=None):
    sampler = InterleaveSampler(list(names))
    state = {"credits": dict(credits), "tokens": tokens}
    sampler.restore_state(json.loads(json.dumps(state)), renamed or {}, shares)
    return sampler


def order_of(sampler, shares, lengths, rows):
    picked = []
    for row in range(rows):
        (member,) = sampler.pick(np.array([row]), shares, 0)
        picked.append(sampler.names[member])
        sampler.settle(shares, np.array(lengths) * (np.arange(len(lengths)) == member))
    return "".join(picked)


HALVES = np.array([0.5, 0.5])


def test_the_one_with_fewer_tokens_catches_up_first():
    """Conformance: counters [0, 100], three samples of two tokens each: a a a, then b b b.

    Of 100 tokens each was due 50: 50 are owed to a, and b has 50 too many.
    """
    sampler = sampler_with({"a": 50, "b": -50}, 100)
    assert order_of(sampler, HALVES, [2, 2], 3) == "aaa"
    assert sampler.credits.tolist() == [47, -47]  # counters 6 and 100
    assert order_of(sampler, np.array([0.0, 1.0]), [2, 2], 3) == "bbb"  # a has ended
    assert sampler.tokens == 100 + 6 + 6


def test_a_new_member_begins_level():
    """Conformance: ``{old: 120}``, then old and new: by default new counts as having 120 too."""
    sampler = sampler_with({"a": 0.0}, 120)
    assert sampler.credits.tolist() == [0, 0]
    assert order_of(sampler, HALVES, [2, 2], 8) == "abababab"


def test_a_new_member_that_begins_at_zero_is_owed_all_that_the_others_had():
    """Conformance: 120 tokens of two each are 60 rows of the new one before the first old one."""
    sampler = sampler_with({"a": 0.0}, 120, shares=HALVES)
    assert sampler.credits.tolist() == [-60, 60]
    assert order_of(sampler, HALVES, [2, 2], 66) == "b" * 60 + "ababab"


def test_what_is_owed_to_a_new_member_follows_its_share():
    """Of 120 tokens new was due 30 at a quarter; a and b, which split them, 60 and 30."""
    shares = np.array([0.5, 0.25, 0.25])
    sampler = sampler_with({"a": 1.0, "b": -1.0}, 120, "abc", shares=shares)
    assert sampler.credits.tolist() == pytest.approx([1 - 20, -1 - 10, 30])


def test_a_member_that_leaves_keeps_its_credit_until_it_comes_back():
    state = {"credits": {"a": 30.0, "b": -20.0, "c": -10.0}, "tokens": 500}
    without_b = InterleaveSampler(["a", "c"])
    without_b.restore_state(state, {}, None)
    order_of(without_b, HALVES, [10, 10], 4)
    between = saved(without_b)
    assert between == {"credits": {"a": 10.0, "b": -20.0, "c": 10.0}, "tokens": 540}
    back = InterleaveSampler(["a", "b", "c"])
    back.restore_state(between, {}, None)
    assert back.credits.tolist() == [10, -20, 10]
    assert saved(back) == between


def test_a_renamed_member_keeps_its_credit():
    renamed = {"data/a": "../data/a"}
    sampler = sampler_with({"data/a": 7.0, "b": -7.0}, 90, ["../data/a", "b"], renamed)
    assert saved(sampler) == {"credits": {"../data/a": 7.0, "b": -7.0}, "tokens": 90}


def test_what_was_drawn_for_a_start_is_scaled_and_not_counted():
    """13 rows of a and b, 1 : 3, in the order b a b b: credits are those after one row."""
    mixture, _ = interleave([1, 3], row_tokens=0)
    mixture.open(0)
    drawn = mixture.draw(np.arange(13))
    assert drawn.tolist() == [1, 0, 1, 1] * 3 + [1]
    mixture.settle(np.bincount(drawn, minlength=2))
    mixture.begin_here()
    assert saved(mixture)[""] == {
        "identity": "", "credits": {"s000": 0.25, "s001": -0.25}, "tokens": 0
    }  # fmt: skip
    mixture.begin_here(200)
    assert saved(mixture)[""]["credits"] == {"s000": 50, "s001": -50}
    assert mixture.draw(np.arange(1)).tolist() == [0]
