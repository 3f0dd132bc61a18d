# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""A computed order has every index once, is reproducible and looks random."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_ext.errors import ConfigError
from energon_ext.keyed import KeyedPermutation, sha256, sha256_of_file

#: Sizes around the switch from a table to the network, squares, and products with a remainder.
SIZES = (1, 2, 3, 7, 4095, 4096, 4097, 4160, 4225, 10_007, 65_536, 99_999)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("key", [0, "web/epoch 1"])
def test_every_index_is_reached_once(size, key):
    order = KeyedPermutation(size, key)(np.arange(size))
    assert order.dtype == np.int64
    assert np.array_equal(np.sort(order), np.arange(size))


@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 2**62), key=st.integers(0, 2**64), data=st.data())
def test_indices_of_any_size_stay_in_range_and_distinct(size, key, data):
    some = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=50, unique=True))
    order = KeyedPermutation(size, key)
    mapped = order(np.array(some))
    assert len(set(mapped.tolist())) == len(some)
    assert mapped.min() >= 0 and mapped.max() < size
    # The result for an index is independent of the other indices and of the dtype.
    assert order(np.array(some[:1], np.uint64)).tolist() == mapped[:1].tolist()
    assert order(np.array([some, some])).tolist() == [mapped.tolist()] * 2


def test_the_order_never_changes_between_versions():
    assert KeyedPermutation(10, "web")(np.arange(10)).tolist() == [6, 5, 2, 7, 1, 9, 4, 8, 0, 3]
    assert KeyedPermutation(10**15, "web")(np.arange(4)).tolist() == [
        378672544017282,
        303902654018365,
        95769797797898,
        388138337584373,
    ]


def test_all_orders_of_three_are_equally_frequent():
    orders = Counter(tuple(KeyedPermutation(3, key)(np.arange(3)).tolist()) for key in range(3000))
    assert len(orders) == 6
    # 500 of each are expected, with a deviation of about 20.
    assert all(400 < count < 600 for count in orders.values())


@pytest.mark.parametrize("size", [5000, 1 << 20, 10**9, 10**15 + 7])
def test_a_stretch_of_the_order_looks_random(size):
    """Chi-square tests over 16 parts of the range, for neighbours, every 16th index and the last
    indices: their positions, and the distances between successive positions."""
    order = KeyedPermutation(size, "mixed")
    for start, step in ((0, 1), (0, 16), (size - 1, -1)):
        count = min(4096, size // abs(step))
        mapped = order(start + step * np.arange(count))
        for values in (mapped, np.diff(mapped) % size):
            parts = np.bincount((values / size * 16).astype(int), minlength=16)
            expected = len(values) / 16
            # 15 degrees of freedom: the mean is 15, and 45 is exceeded once in 14,000 times.
            assert ((parts - expected) ** 2 / expected).sum() < 45


def test_each_key_and_size_gives_its_own_order():
    first = [
        KeyedPermutation(size, key)(np.arange(200)).tolist()
        for size in (10_000, 10_001)
        for key in range(20)
    ]
    assert len({tuple(order) for order in first}) == 40
    # A random order keeps one index in place on average.
    kept = [sum(index == value for index, value in enumerate(order)) for order in first]
    assert sum(kept) < 40


@pytest.mark.parametrize("size", [0, -1, 2**62 + 1, True])
def test_an_impossible_size_is_refused(size):
    with pytest.raises(ConfigError, match="1 to 2\\^62"):
        KeyedPermutation(size, "k")


@pytest.mark.parametrize("size", [10, 10_000])
def test_an_index_out_of_range_raises_index_error(size):
    for index in (-1, size):
        with pytest.raises(IndexError, match="out of range"):
            KeyedPermutation(size, "k")(np.array([0, index]))


def test_the_digest_of_parts_is_the_sha256_of_their_concatenation(tmp_path):
    # FIPS 180-4, example B.1: the message "abc".
    expected = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert sha256("abc") == sha256(b"a", "b", memoryview(b"c")) == expected
    assert sha256("é") == sha256(b"\xc3\xa9")
    (tmp_path / "file").write_bytes(b"abc")
    assert sha256_of_file(tmp_path / "file") == expected
