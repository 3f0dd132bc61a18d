# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Exact shares of an epoch, and where in a document they lie."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_ext.errors import ConfigError
from energon_ext.splice import document_quotas
from energon_ext.splice.quotas import TurningQuotas
from energon_ext.splice.starts import EdgeWeights, Phases, check_exact, quantile_numbers
from tests.splice import slow


def test_quotas_by_length_by_document_and_between():
    lengths = [10_000, 5_000, 2_000]
    assert document_quotas(lengths, 17_000).tolist() == lengths
    assert document_quotas(lengths, 30_000, "by_document").tolist() == [10_000] * 3
    # Square roots 100, 70.71, 44.72: of 1000, 464.14, 328.20 and 207.57.
    halfway = document_quotas(lengths, 1000, "by_temperature", 0.5)
    assert halfway.tolist() == [464, 328, 208]


def test_equal_remainders_go_to_the_lower_index():
    assert document_quotas([5, 5, 5], 2).tolist() == [1, 1, 0]
    assert document_quotas([1, 1, 1, 1], 6, "by_document").tolist() == [2, 2, 1, 1]


def test_document_weights_multiply():
    assert document_quotas([4, 4, 4], 70, doc_weights=[1.0, 0.5, 2.0]).tolist() == [20, 10, 40]
    assert document_quotas([1, 9], 10, "by_document", doc_weights=[3, 2]).tolist() == [6, 4]


@settings(max_examples=200, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 10**6), min_size=1, max_size=12),
    epoch_length=st.integers(0, 3000),
    tau=st.sampled_from([0.0, 1.0, 0.3, 0.7]),
    weights=st.none() | st.lists(st.floats(0.01, 100), min_size=12, max_size=12),
)
def test_quotas_are_the_largest_remainders_in_exact_arithmetic(lengths, epoch_length, tau, weights):
    weights = weights and weights[: len(lengths)]
    got = document_quotas(lengths, epoch_length, "by_temperature", tau, weights).tolist()
    shares = [slow.Fraction(length if tau == 1 else float(length) ** tau) for length in lengths]
    if weights:
        shares = [share * slow.Fraction(weight) for share, weight in zip(shares, weights)]
    assert got == slow.quotas(shares, epoch_length)
    assert sum(got) == epoch_length


def test_quotas_of_huge_epochs_are_exact():
    # Floats would lose the last places of 10^17 / 3.
    quotas = document_quotas([1, 1, 1], 10**17)
    assert quotas.tolist() == [33_333_333_333_333_334, *[33_333_333_333_333_333] * 2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([3], 4, "even"), "balance_mode: 'even'"),
        (([], 4), "0 documents"),
        (([3, 0], 4), "the shortest of 0 tokens"),
        (([3], -1), "epoch_length: -1 found"),
        (([3, 1], 2.5), "epoch_length: 2.5 found"),
        (([3, float("nan")], 2), "doc_lengths: float64 found"),
        (([3], 4, "by_temperature", 1.5), "balance_tau: 1.5 found"),
        (([3, 3], 4, "by_coverage", 1.0, [1.0, float("inf")]), r"doc_weights.1.: inf found"),
        (([3, 3], 4, "by_coverage", 1.0, [1.0]), "1 found for 2 documents"),
        (([3], 4, "by_coverage", 1.0, [0.0]), "not all 0"),
    ],
)
def test_quotas_that_cannot_be_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        document_quotas(*arguments)


def test_a_document_whose_part_is_below_one_example_takes_turns():
    """Of 4 examples the first has 2, as ever; ten documents share the other 2, in 5 epochs."""
    lengths = [50, *[5] * 10]
    assert document_quotas(lengths, 4).tolist() == [2, 1, 1, *[0] * 8]
    turning = TurningQuotas(lengths, 4, key="a")
    assert turning.quotas == pytest.approx([2, *[0.2] * 10])
    for first in (0, 5, 500):
        epochs = np.array([turning.of(epoch) for epoch in range(first, first + 5)])
        assert (epochs.sum(axis=1) == 4).all() and (epochs[:, 0] == 2).all()
        assert epochs[:, 1:].sum(axis=0).tolist() == [1] * 10
    others = [TurningQuotas(lengths, 4, key=key).of(0).tolist() for key in "abcdef"]
    assert others[0] == turning.of(0).tolist() and others.count(others[0]) < 6


def test_where_nothing_is_left_for_the_smallest_the_largest_gives_one_place():
    turning = TurningQuotas([100, 100, 1], 4, key="")
    assert document_quotas([100, 100, 1], 4).tolist() == [2, 2, 0]
    assert turning.of(7).tolist() == [1, 2, 1]
    assert not TurningQuotas([9, 9, 1], 4, doc_weights=[1, 1, 0], key="").take_turns


@settings(max_examples=100, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 10**6), min_size=1, max_size=30),
    epoch_length=st.integers(1, 20),
    tau=st.sampled_from([0.0, 1.0, 0.3]),
    first=st.integers(0, 10**6),
    is_weighted=st.booleans(),
)
def test_every_document_has_its_turns_in_every_round_and_in_proportion(
    lengths, epoch_length, tau, first, is_weighted
):
    # Roots make parts of more than 64 bits, of which none is nearly that of a whole round.
    weights = [(1 + n % 3) ** 0.5 for n in range(len(lengths))] if is_weighted else None
    turning = TurningQuotas(lengths, epoch_length, "by_temperature", tau, weights, key="x")
    quotas = np.array([turning.of(first + epoch) for epoch in range(60)])
    assert (quotas.sum(axis=1) == epoch_length).all()
    assert turning.quotas.sum() == pytest.approx(epoch_length)
    assert (abs(quotas - turning.quotas) < 1).all()
    fixed = document_quotas(lengths, epoch_length, "by_temperature", tau, weights)
    if not turning.take_turns:
        assert (quotas == fixed).all() and (fixed > 0).all()
        return
    parts = np.array([float(length) ** tau for length in lengths])
    parts *= weights or 1.0
    parts *= epoch_length / parts.sum()
    below = parts < 1 - 1e-9
    exact = parts[below] / parts[below].sum() * turning.quotas[below].sum()
    # Parts of more than 64 bits are rounded to the 2^-40th of an example.
    assert turning.quotas[below] == pytest.approx(exact, rel=1e-9, abs=2**-39)
    rounds = int(np.ceil(1 / turning.quotas.min() - 1e-9))
    if rounds < 2000:
        start = -(-first // rounds) * rounds
        seen = sum(turning.of(epoch) for epoch in range(start, start + rounds))
        assert (seen > 0).all()


def spread(total, quota, phase):
    arguments = ([total] * quota, [quota] * quota, range(quota), [phase] * quota)
    return quantile_numbers(*map(np.array, arguments)).tolist()


def test_picks_lie_in_equal_parts_at_a_phase():
    assert spread(7, 7, 6) == [0, 1, 2, 3, 4, 5, 6]
    assert spread(7, 2, 0) == [0, 3] and spread(7, 2, 3) == [1, 5] and spread(7, 2, 6) == [3, 6]
    assert spread(2, 5, 0) == [0, 0, 0, 1, 1] and spread(2, 5, 1) == [0, 0, 1, 1, 1]
    assert all(spread(2, 4, phase) == [0, 0, 1, 1] for phase in (0, 1))


@pytest.mark.parametrize(("whole", "quota"), [(4937, 4), (100, 7), (12, 5), (5, 9), (1, 3)])
def test_phases_of_a_round_pick_everything_and_rounds_differ(whole, quota):
    rounds = -(-whole // quota)
    phases = Phases(np.array([3, whole]), np.array([1, quota]), key="a")
    begins = []
    for first in (0, rounds, 10 * rounds):
        epochs = np.arange(first, first + rounds)
        found = phases.of(np.ones_like(epochs), epochs).tolist()
        assert {pick for phase in found for pick in spread(whole, quota, phase)} == {*range(whole)}
        begins.append(found[0])
    assert whole < 12 or len(set(begins)) > 1
    # Neighbouring epochs are not neighbouring starts.
    if rounds > 10:
        assert abs(found[1] - found[0]) > 2 * quota


def test_the_weights_of_ten_tokens_and_contents_of_four():
    weights = EdgeWeights(content_length=4, content_stride=1, alpha=1.0)
    # d = 1 2 3 4 3 2 1, so K/d = 4 2 4/3 1 4/3 2 4, together 47/3.
    bounds = np.cumsum([4, 2, 4 / 3, 1, 4 / 3, 2, 4]) / (47 / 3)
    for start, bound in enumerate(bounds[:-1]):
        at = np.array([bound - 1e-9, bound + 1e-9])
        assert weights.rows(np.array([6, 6]), at).tolist() == [start, start + 1]


def test_a_bound_between_two_starts_belongs_to_the_second():
    """Contents of one token: eight starts that weigh the same, which floats divide exactly."""
    weights = EdgeWeights(content_length=1, content_stride=1, alpha=2.0)
    fractions = np.arange(8) / 8
    assert weights.rows(np.full(8, 7), fractions).tolist() == list(range(8))


@settings(max_examples=150, deadline=None)
@given(
    content=st.integers(1, 12),
    more=st.integers(0, 40),
    fraction=st.fractions(0, 1).filter(lambda f: f < 1),
    alpha=st.integers(0, 3),
    stride=st.integers(1, 60) | st.just(10**9),
)
def test_weighted_starts_are_those_of_exact_quantiles(content, more, fraction, alpha, stride):
    weights = EdgeWeights(content, stride, float(alpha))
    got = int(weights.rows(np.array([more]), np.array([float(fraction)]))[0]) * stride
    # Float sums may fall to either side of a bound that is met exactly.
    nudges = (fraction + slow.Fraction(n, 10**12) for n in (-1, 0, 1))
    exact = {slow.start_at(f, content + more, content, alpha, stride) for f in nudges if 0 <= f < 1}
    assert got in exact
    of_each = weights.of(more)
    assert weights.totals(np.array([more])) == pytest.approx(of_each.sum())
    distances = [max(1, min(t + 1, more - t + 1, content)) for t in range(0, more + 1, stride)]
    assert of_each == pytest.approx([(content / d) ** alpha for d in distances])


def test_counts_too_large_to_multiply_are_refused():
    with pytest.raises(ConfigError, match="too many to spread exactly"):
        check_exact(np.array([10, 10**10]), np.array([10**10, 10**9]))
    check_exact(np.array([10**11]), np.array([10**11]))  # one example of each pair
    with pytest.raises(ConfigError, match="examples of 1073741824 pairs"):
        check_exact(np.array([5, 2**30]), np.array([5, 2**31]))
    check_exact(np.zeros(0, np.int64), np.zeros(0, np.int64))


@settings(max_examples=100, deadline=None)
@given(total=st.integers(1, 2**61), number=st.floats(0, 1), phase=st.floats(0, 1))
def test_the_largest_counts_that_are_allowed_are_multiplied_exactly(total, number, phase):
    """Their product is just below 2^61; Python's integers have no end."""
    quota = 2**61 // total - 2**10
    if quota < 1 or quota == total:
        return
    check_exact(np.array([total]), np.array([quota]))
    number, phase = (min(int(n * of), of - 1) for n, of in ((number, quota), (phase, total)))
    picked = quantile_numbers(*(np.array([each]) for each in (total, quota, number, phase)))
    assert picked.tolist() == [(total * number + phase) // quota]
