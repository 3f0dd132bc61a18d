# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Items into bins: of a closed set, and of a buffer that is filled again."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon_ext.errors import ConfigError, SampleError
from energon_ext.packing import best_fit_decreasing, fill_bins
from tests.packing import slow

items_lists = st.lists(st.integers(1, 20), max_size=60)
at_most = st.none() | st.integers(1, 5)


def fill(lengths, capacity, **options):
    items, ends = fill_bins(np.array(lengths, np.int64), capacity, **options)
    return [part.tolist() for part in np.split(items, ends[:-1])] if ends else []


# A closed set -------------------------------------------------------------------------------------


@given(lengths=items_lists, capacity=st.integers(20, 40), most=at_most)
def test_fast_best_fit_is_the_slow_definition(lengths, capacity, most):
    bins = best_fit_decreasing(lengths, capacity, max_items_per_bin=most)
    assert bins == slow.best_fit_decreasing(lengths, capacity, most)
    assert sorted(item for items in bins for item in items) == list(range(len(lengths)))
    assert all(sum(lengths[item] for item in items) <= capacity for items in bins)


def test_best_fit_of_known_items():
    assert best_fit_decreasing([6, 2, 6, 2], 8) == [[0, 1], [2, 3]]
    assert best_fit_decreasing([1, 1, 1, 1], 8) == [[0, 1, 2, 3]]
    assert best_fit_decreasing([], 8) == []
    assert best_fit_decreasing([1] * 4, 8, max_items_per_bin=3) == [[0, 1, 2], [3]]
    # The 2 fits both bins: the first one holds 12 of 20, the fullest one 18.
    assert slow.first_fit_decreasing([12, 9, 9, 2], 20) == [[0, 3], [1, 2]]
    assert best_fit_decreasing([12, 9, 9, 2], 20) == [[0], [1, 2, 3]]


@pytest.mark.parametrize("lengths", [[9], [0], [3, -1]])
def test_an_item_that_fits_no_bin_is_an_error_that_names_it(lengths):
    with pytest.raises(SampleError, match=f"Item {len(lengths) - 1}"):
        best_fit_decreasing(lengths, 8)
    with pytest.raises(ConfigError, match="capacity"):
        best_fit_decreasing([1], 0)


def test_lengths_beyond_16_bits_are_told_apart():
    """Cut to 16 bits, 65,537 would be 1."""
    items, ends = fill_bins(np.array([1, 65_537, 65_537, 1]), capacity=65_538)
    assert [part.tolist() for part in np.split(items, ends[:-1])] == [[0, 1], [2, 3]]


def test_random_lengths_fill_bins_well():
    lengths = np.random.default_rng(0).integers(1, 200, 4000).tolist()
    bins = best_fit_decreasing(lengths, 512)
    assert sum(lengths) / (512 * len(bins)) > 0.995


# A buffer -----------------------------------------------------------------------------------------


@given(
    lengths=st.lists(st.integers(1, 20), max_size=80),
    capacity=st.integers(20, 40),
    keep=st.integers(0, 40),
    most=at_most,
)
def test_fast_filling_is_the_slow_definition(lengths, capacity, keep, most):
    assert fill(lengths, capacity, keep=keep, max_items_per_bin=most) == slow.fill(
        lengths, capacity, keep, most
    )


@given(
    lengths=st.lists(st.integers(1, 20), max_size=80),
    capacity=st.integers(20, 40),
    keep=st.integers(0, 40),
    most=at_most,
)
def test_filled_bins_hold_items_once_and_leave_as_many_as_they_were_told(
    lengths, capacity, keep, most
):
    bins = fill(lengths, capacity, keep=keep, max_items_per_bin=most)
    items = [item for part in bins for item in part]
    assert len(set(items)) == len(items)
    assert all(sum(lengths[item] for item in part) <= capacity for part in bins)
    assert all(len(part) <= (most or 1000) for part in bins)
    left = len(lengths) - len(items)
    assert left <= keep
    # No bin was filled that was not needed for that.
    assert not bins or left + len(bins[-1]) > keep


@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=80), capacity=st.integers(20, 40))
def test_every_filled_bin_begins_with_the_oldest_item_that_is_left(lengths, capacity):
    left = list(range(len(lengths)))
    for part in fill(lengths, capacity):
        assert part[0] == left[0]
        left = [item for item in left if item not in part]


def test_a_bin_ends_with_the_pair_that_fills_it_exactly():
    # After 10, the longest that fits leaves 1 empty; 5 and 4 leave nothing.
    assert fill([10, 5, 8, 4], 19, keep=1) == [[0, 1, 3]]
    # Two of one length are a pair, one of them is not.
    assert fill([10, 4, 7, 4], 18, keep=1) == [[0, 1, 3]]
    assert fill([10, 4, 7], 18, keep=1) == [[0, 2]]


@pytest.mark.parametrize("lengths", [[9], [0], [3, -1]])
def test_an_item_that_does_not_fit_is_refused(lengths):
    with pytest.raises(SampleError, match=r"1..8 fit into a bin"):
        fill(lengths, 8)
    with pytest.raises(ConfigError, match="capacity 0"):
        fill([1], 0)
    with pytest.raises(ConfigError, match="max_items_per_bin 0"):
        fill([1], 8, max_items_per_bin=0)
