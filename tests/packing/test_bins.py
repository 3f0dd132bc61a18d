# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Best-fit decreasing bin packing."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from energon_ext.packing.bins import best_fit
from tests.packing import slow


def best_fit_decreasing(lengths, capacity, most=None, kinds=None):
    """Return the items of every bin, in the form of the slow definition."""
    order = sorted(range(len(lengths)), key=lambda item: -lengths[item])
    ordered = [None if each is None else [each[n] for n in order] for each in (lengths, kinds)]
    bins = {}
    for item, number in zip(order, best_fit(ordered[0], capacity, most, ordered[1]).tolist()):
        bins.setdefault(number, []).append(item)
    return list(bins.values())


@given(
    lengths=st.lists(st.integers(1, 20), max_size=60),
    capacity=st.integers(20, 40),
    most=st.none() | st.integers(1, 5),
)
def test_fast_best_fit_is_the_slow_definition(lengths, capacity, most):
    bins = best_fit_decreasing(lengths, capacity, most)
    assert bins == slow.best_fit_decreasing(lengths, capacity, most)
    assert sorted(item for items in bins for item in items) == list(range(len(lengths)))
    assert all(sum(lengths[item] for item in items) <= capacity for items in bins)


@given(
    items=st.lists(st.tuples(st.integers(1, 20), st.integers(-1, 4)), max_size=40),
    most=st.none() | st.integers(1, 5),
)
def test_no_bin_gets_two_items_of_a_kind(items, most):
    lengths, kinds = [length for length, _ in items], [kind for _, kind in items]
    alone = [kind if kind >= 0 else 100 + item for item, kind in enumerate(kinds)]
    bins = best_fit_decreasing(lengths, 30, most, kinds)
    assert bins == slow.best_fit_decreasing(lengths, 30, most, documents=alone)
    assert all(len({alone[item] for item in items}) == len(items) for items in bins)


def test_best_fit_of_known_items():
    assert best_fit_decreasing([6, 2, 6, 2], 8) == [[0, 1], [2, 3]]
    assert best_fit_decreasing([1, 1, 1, 1], 8) == [[0, 1, 2, 3]]
    assert best_fit_decreasing([], 8) == []
    assert best_fit_decreasing([1] * 4, 8, 3) == [[0, 1, 2], [3]]
    # The 2 fits into both bins: the first contains 12 of 20, the fullest 18.
    assert slow.first_fit_decreasing([12, 9, 9, 2], 20) == [[0, 3], [1, 2]]
    assert best_fit_decreasing([12, 9, 9, 2], 20) == [[0], [1, 2, 3]]
    # The last 2 may be in neither the fullest bin nor the next one, which have one of its kind.
    assert best_fit_decreasing([7, 6, 5, 2, 2, 2], 9, kinds=[-1, -1, -1, 8, 8, 8]) == [
        *([0, 3], [1, 4], [2, 5])
    ]


def test_random_lengths_fill_bins_well():
    lengths = np.random.default_rng(0).integers(1, 200, 4000).tolist()
    bins = best_fit_decreasing(lengths, 512)
    assert sum(lengths) / (512 * len(bins)) > 0.995
