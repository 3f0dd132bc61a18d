# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Every document once per epoch, and documents of a block near each other."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_ext.errors import ConfigError
from energon_ext.keyed import KeyedPermutation, keyed_draws, stable_hash
from energon_ext.plan import order as module
from energon_ext.plan.order import EpochOrder


def slow_epoch(size, key, epoch, block, mixed):
    """Return one epoch by plain lists, from the same random numbers."""
    if block == 1:
        return [int(KeyedPermutation(size, f"{key}/{epoch}")(number)) for number in range(size)]
    rotation = stable_hash(f"{key}/{epoch}/rotated") % size
    numbers = [(number + rotation) % size for number in range(size)]
    blocks = [numbers[first : first + block] for first in range(0, size, block)]
    full = [each for each in blocks if len(each) == block]
    if full:
        permuted = KeyedPermutation(len(full), f"{key}/{epoch}")(np.arange(len(full)))
        blocks = [full[number] for number in permuted.tolist()] + blocks[len(full) :]
    drawn = keyed_draws(np.arange(size), np.full(size, 2**31), f"{key}/{epoch}/mixed").tolist()
    epoch_order = []
    for first in range(0, len(blocks), mixed):
        group = [number for each in blocks[first : first + mixed] for number in each]
        places = range(len(epoch_order), len(epoch_order) + len(group))
        epoch_order += [number for _, number in sorted(zip([drawn[p] for p in places], group))]
    return epoch_order


def test_a_small_epoch_by_hand(monkeypatch):
    """Ten documents, rotated by 4, in blocks of 3, and pairs of blocks; all orders reversed."""
    monkeypatch.setattr(module, "KeyedPermutation", lambda size, key: lambda n: size - 1 - n)
    monkeypatch.setattr(module, "keyed_draws", lambda places, bounds, key: -places)
    monkeypatch.setattr(module, "stable_hash", lambda text: 14)
    order = EpochOrder(10, "images", block=3, mixed=2)
    # Blocks: 4 5 6, 7 8 9, 0 1 2, and 3. In the random order: 0 1 2, 7 8 9 | 4 5 6, 3.
    assert order.take(10).tolist() == [9, 8, 7, 2, 1, 0, 3, 6, 5, 4]


@pytest.mark.parametrize("block", [1, 2, 3, 4, 7, 50])
@pytest.mark.parametrize("mixed", [1, 2, 3, 50])
def test_every_document_comes_once_per_epoch(block, mixed):
    for size in range(1, 41):
        order = EpochOrder(size, "images", block=block, mixed=mixed, epochs=2)
        epochs = [order.take(99).tolist()]
        assert not order.ended and (order.epoch, order.position) == (0, size)  # only asked
        assert len(order.peek(1)) == 1 and (order.epoch, order.position) == (1, 0)
        epochs.append(order.take(99).tolist())
        assert order.ended
        for number, epoch in enumerate(epochs):
            assert sorted(epoch) == list(range(size))
            assert epoch == slow_epoch(size, "images", number, block, mixed)


@settings(max_examples=2 * settings().max_examples)
@given(
    size=st.integers(1, 30_000),
    block=st.integers(1, 300),
    mixed=st.integers(1, 40),
    counts=st.lists(st.integers(1, 9000), min_size=1, max_size=8),
)
def test_order_does_not_depend_on_chunk_size(size, block, mixed, counts):
    whole = EpochOrder(size, "images", block=block, mixed=mixed).take(size).tolist()
    order, taken = EpochOrder(size, "images", block=block, mixed=mixed), []
    for count in counts:
        peeked = order.peek(count).tolist() if order.position < size else []
        assert order.take(count).tolist() == peeked
        taken += peeked
    assert taken == whole[: len(taken)]
    resumed = EpochOrder(size, "images", block=block, mixed=mixed)
    resumed.position = order.position
    assert resumed.take(size).tolist() == whole[len(taken) :]


def test_blocks_of_one_keep_the_plain_order():
    for mixed in (1, 7):
        order = EpochOrder(10, "web", block=1, mixed=mixed)
        assert order.take(10).tolist() == KeyedPermutation(10, "web/0")(np.arange(10)).tolist()
    assert (
        EpochOrder(10, "web", block=1).take(10).tolist() == EpochOrder(10, "web").take(10).tolist()
    )


def test_groups_are_contiguous_runs_of_the_source():
    size, block, mixed = 100_000, 16, 256
    order = EpochOrder(size, "images", block=block, mixed=mixed)
    firsts = []
    for epoch in range(2):
        order.epoch, order.position = epoch, 0
        group = np.sort(order.take(block * mixed))
        begins = np.flatnonzero(np.diff(group, prepend=-2) != 1)
        # A block that begins after the last document ends at the first one.
        assert mixed - 40 < len(begins) <= mixed + 1
        firsts.append(group[begins] % block)
        # Shuffled: a quarter of the group contains about a quarter of most blocks.
        order.position = 0
        quarter = np.unique(order.take(block * mixed // 4) // block)
        assert len(quarter) > 0.9 * mixed
    assert np.bincount(firsts[0]).max() > 0.9 * len(firsts[0])  # all cut at the same places,
    assert np.bincount(firsts[0]).argmax() != np.bincount(firsts[1]).argmax()  # of this epoch


def test_block_order_is_stable_across_versions():
    order = EpochOrder(1_000_000, "images", block=16, mixed=256)
    assert order.take(4).tolist() == [259551, 526647, 938659, 228502]
    order.epoch, order.position = 3, 999_998
    assert order.take(4).tolist() == [797015, 113850]


def test_an_unshuffled_source_has_no_blocks():
    order = EpochOrder(5, "images", shuffled=False, block=2, mixed=2)
    assert order.take(5).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("options", [{"block": 0}, {"mixed": 0}, {"block": 1.5}, {"mixed": True}])
def test_an_invalid_block_size_is_refused(options):
    with pytest.raises(ConfigError, match=f"{next(iter(options))}: .* an integer >= 1 is needed"):
        EpochOrder(5, "images", **options)
