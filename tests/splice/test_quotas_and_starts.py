# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Quotas of documents in an epoch, and the starts of their contents."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_ext.errors import ConfigError
from energon_ext.splice import document_quotas
from energon_ext.splice.quotas import turning_quotas
from energon_ext.splice.starts import EdgeWeights, quantile_numbers
from tests.splice import slow


def test_the_quotas_of_seventeen_examples():
    lengths = [10_000, 5_000, 2_000]
    assert document_quotas(lengths, 17).tolist() == [10, 5, 2]
    assert document_quotas(lengths, 17, "by_document").tolist() == [6, 6, 5]
    assert document_quotas(lengths, 17, "by_temperature", 1.0).tolist() == [10, 5, 2]
    assert document_quotas(lengths, 17, "by_temperature", 0.0).tolist() == [6, 6, 5]


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
    # Parts 4/3, 1/3, 4/3: equal remainders, though not those of the floats.
    assert document_quotas([4, 1, 4], 3).tolist() == [2, 0, 1]


def test_document_weights_multiply():
    assert document_quotas([4, 4, 4], 70, doc_weights=[1.0, 0.5, 2.0]).tolist() == [20, 10, 40]
    assert document_quotas([1, 9], 10, "by_document", doc_weights=[3, 2]).tolist() == [6, 4]


@settings(max_examples=2 * settings().max_examples)
@given(
    lengths=st.lists(st.integers(1, 10**6), min_size=1, max_size=12),
    epoch_length=st.integers(1, 3000),
    tau=st.sampled_from([0.0, 1.0, 0.3, 0.7]),
    weights=st.none() | st.lists(st.floats(0.01, 100), min_size=12, max_size=12),
)
def test_quotas_are_the_largest_remainders_of_fractions(lengths, epoch_length, tau, weights):
    weights = weights and weights[: len(lengths)]
    got = document_quotas(lengths, epoch_length, "by_temperature", tau, weights).tolist()
    shares = [slow.Fraction(length if tau == 1 else float(length) ** tau) for length in lengths]
    if weights:
        shares = [share * slow.Fraction(weight) for share, weight in zip(shares, weights)]
    assert got == slow.quotas(shares, epoch_length)
    assert sum(got) == epoch_length


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([3], 4, "even"), "balance_mode: 'even'"),
        (([3], 4, "every_pair"), "epoch_length: 4 found with balance_mode: every_pair"),
        (([], 4), r"doc_lengths: \[\] found, integers >= 1 are needed, one or more"),
        (([3, 0], 4), r"doc_lengths: \[3, 0\] found"),
        (([3], -1), "epoch_length: -1 found"),
        (([3, 1], 2.5), "epoch_length: 2.5 found"),
        (([3, float("nan")], 2), r"doc_lengths: \[3.0, nan\] found"),
        (([3], 4, "by_temperature", 1.5), "balance_tau: 1.5 found"),
        (([3, 3], 4, "by_coverage", 1.0, [1.0, float("inf")]), r"doc_weights.1.: inf found"),
        (([3, 3], 4, "by_coverage", 1.0, [1.0]), "1 found for 2 documents"),
        (([3], 4, "by_coverage", 1.0, [0.0]), "at least one > 0"),
        (([3], 2**31 + 1), "gives one document 2147483649 examples; at most 2147483648 are"),
    ],
)
def test_impossible_quotas_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        document_quotas(*arguments)


def test_float_error_neither_adds_examples_nor_feeds_zero_shares():
    assert turning_quotas(np.array([2.5, 1.5]), 1 - 2**-53).tolist() == [3, 1]
    tenths = np.array([0.1] * 10 + [0.0])
    assert tenths.cumsum()[-1] < 1
    assert turning_quotas(tenths, 0.0).tolist() == [*[0] * 9, 1, 0]


@settings(max_examples=2 * settings().max_examples)
@given(
    shares=st.lists(st.floats(0, 1) | st.integers(0, 10**6), min_size=1, max_size=30),
    epoch_length=st.integers(1, 10**6),
    offset=st.floats(0, 1, exclude_max=True),
)
def test_rotating_quotas_fill_the_epoch_within_one_of_their_shares(shares, epoch_length, offset):
    shares = np.array(shares, float)
    if not shares.sum() > 1e-9:
        return
    parts = shares * epoch_length / shares.sum()
    quotas = turning_quotas(parts, offset)
    assert quotas.sum() == epoch_length
    assert (abs(quotas - parts) < 1 + 1e-6).all()
    assert (quotas[parts == 0] == 0).all()


def spread(total, quota, phase):
    arguments = ([total] * quota, [quota] * quota, range(quota), [phase] * quota)
    return quantile_numbers(*map(np.array, arguments)).tolist()


def test_picks_are_evenly_spaced_at_a_phase():
    assert all(spread(7, 7, phase) == [0, 1, 2, 3, 4, 5, 6] for phase in (0.0, 0.5, 0.999))
    assert spread(7, 2, 0.0) == [0, 3] and spread(7, 2, 3.5 / 7) == [1, 5]
    assert spread(7, 2, 6.5 / 7) == [3, 6]
    assert spread(2, 5, 0.0) == [0, 0, 0, 1, 1] and spread(2, 5, 0.6) == [0, 0, 1, 1, 1]
    assert all(spread(2, 4, phase) == [0, 0, 1, 1] for phase in (0.0, 0.9))


@settings(max_examples=2 * settings().max_examples)
@given(
    total=st.integers(1, 2**62),
    quota=st.integers(1, 2**31) | st.none(),
    number=st.floats(0, 1),
    phase=st.floats(0, 1, exclude_max=True),
)
def test_picks_of_the_largest_counts_are_exact(total, quota, number, phase):
    """Compare with Python's unbounded integers; the phase is a float."""
    quota = total if quota is None else quota
    number = min(int(number * quota), quota - 1)
    begin = min(int(np.float64(total) * phase), total - 1)
    picked = quantile_numbers(*(np.array([each]) for each in (total, quota, number, phase)))
    assert picked.tolist() == [(total * number + begin) // quota]
    assert 0 <= picked[0] < total


def test_the_weights_of_ten_tokens_and_contents_of_four():
    edges = EdgeWeights(content_length=4, content_stride=1, alpha=1.0)
    assert (4 / edges.weights(7)).round(9).tolist() == [1, 2, 3, 4, 3, 2, 1]  # d
    # So K/d = 4 2 4/3 1 4/3 2 4, together 47/3.
    bounds = np.cumsum([4, 2, 4 / 3, 1, 4 / 3, 2, 4]) / (47 / 3)
    for start, bound in enumerate(bounds[:-1]):
        at = np.array([bound - 1e-9, bound + 1e-9])
        assert edges.rows(np.array([7, 7]), at).tolist() == [start, start + 1]


def test_a_boundary_between_two_starts_belongs_to_the_second():
    """Contents of one token: eight starts that weigh the same, which floats divide exactly."""
    edges = EdgeWeights(content_length=1, content_stride=1, alpha=2.0)
    fractions = np.arange(8) / 8
    assert edges.rows(np.full(8, 8), fractions).tolist() == list(range(8))


@settings(max_examples=2 * settings().max_examples)
@given(
    content=st.integers(1, 12),
    more=st.integers(0, 40),
    fraction=st.fractions(0, 1).filter(lambda f: f < 1),
    alpha=st.integers(0, 3),
    stride=st.integers(1, 60) | st.just(10**9),
)
def test_weighted_starts_equal_exact_quantiles(content, more, fraction, alpha, stride):
    edges = EdgeWeights(content, stride, float(alpha))
    count = more // stride + 1
    got = int(edges.rows(np.array([count]), np.array([float(fraction)]))[0]) * stride
    # Float sums may fall to either side of a bound that is met exactly.
    nudges = (fraction + slow.Fraction(n, 10**12) for n in (-1, 0, 1))
    exact = {slow.start_at(f, content + more, content, alpha, stride) for f in nudges if 0 <= f < 1}
    assert got in exact
    starts = [row * stride for row in range(count)]
    distances = [min(t + 1, starts[-1] - t + 1, content) for t in starts]
    assert edges.weights(count) == pytest.approx([(content / d) ** alpha for d in distances])
