# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Items into bins."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon_ext.errors import ConfigError, SampleError
from energon_ext.packing import best_fit_decreasing
from tests.packing import slow

items_lists = st.lists(st.integers(1, 20), max_size=60)
at_most = st.none() | st.integers(1, 5)


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
def test_an_item_that_fits_no_bin_is_an_error(lengths):
    with pytest.raises(SampleError, match=r"1\.\.8 fit into a bin"):
        best_fit_decreasing(lengths, 8)
    with pytest.raises(ConfigError, match="capacity"):
        best_fit_decreasing([1], 0)


def test_random_lengths_fill_bins_well():
    lengths = np.random.default_rng(0).integers(1, 200, 4000).tolist()
    bins = best_fit_decreasing(lengths, 512)
    assert sum(lengths) / (512 * len(bins)) > 0.995
