# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Exact shares of an epoch, and where in a document they lie."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_ext.errors import ConfigError
from energon_ext.splice import document_quotas, start_positions
from energon_ext.splice.starts import EdgeWeights, check_exact
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


def test_starts_of_equal_weight_are_the_middles_of_equal_parts():
    assert start_positions(10, 4, 7).tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert start_positions(10, 4, 2).tolist() == [1, 5]  # 7/4 and 21/4
    assert start_positions(5, 4, 5).tolist() == [0, 0, 1, 1, 1]  # 5/10 * 2 = 1 goes right
    assert start_positions(20, 4, 3, content_stride=5).tolist() == [0, 10, 15]
    assert start_positions(4, 4, 3).tolist() == [0, 0, 0]
    assert start_positions(4, 4, 0).tolist() == []


def test_the_weights_of_ten_tokens_and_contents_of_four():
    weights = EdgeWeights(content_length=4, content_stride=1, alpha=1.0)
    # d = 1 2 3 4 3 2 1, so K/d = 4 2 4/3 1 4/3 2 4, together 47/3.
    bounds = np.cumsum([4, 2, 4 / 3, 1, 4 / 3, 2, 4]) / (47 / 3)
    for start, bound in enumerate(bounds[:-1]):
        at = np.array([bound - 1e-9, bound + 1e-9])
        assert weights.rows(np.array([6, 6]), at).tolist() == [start, start + 1]


@settings(max_examples=150, deadline=None)
@given(
    content=st.integers(1, 12),
    more=st.integers(0, 40),
    quota=st.integers(0, 30),
    alpha=st.integers(0, 3),
    stride=st.integers(1, 60) | st.just(10**9),
)
def test_starts_are_those_of_exact_quantiles(content, more, quota, alpha, stride):
    got = start_positions(content + more, content, quota, float(alpha), stride).tolist()
    assert len(got) == quota
    for number, start in enumerate(got):
        fraction = slow.Fraction(2 * number + 1, 2 * quota)
        allowed = {slow.start_at(fraction, content + more, content, alpha, stride)}
        if alpha:  # float sums may fall to either side of a bound that is met exactly
            nudged = fraction - slow.Fraction(1, 10**12)
            allowed.add(slow.start_at(nudged, content + more, content, alpha, stride))
        assert start in allowed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((3, 4, 1), "content_length: 4 found, the document has 3 tokens"),
        ((4, 0, 1), "content_length: 0 found"),
        ((4, 4, -1), "quota: -1 found"),
        ((4, 4, 2.5), "quota: 2.5 found"),
        ((4, 2, 1, -0.5), "alpha: -0.5 found"),
        ((4, 2, 1, float("nan")), "alpha: nan found"),
        ((4, 2, 1, 0.0, 0), "content_stride: 0 found"),
    ],
)
def test_starts_that_cannot_be_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        start_positions(*arguments)


def test_counts_too_large_to_multiply_are_refused():
    with pytest.raises(ConfigError, match="too many to spread exactly"):
        check_exact(np.array([10, 10**10]), np.array([10**10, 10**9]))
    check_exact(np.array([10**11]), np.array([10**11]))  # one example of each pair
