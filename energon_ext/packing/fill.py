# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Bins of one capacity from a buffer of items, filled to the last token.

Decreasing packers place the longest item first, and what is left at the end of a buffer fills its
last bins badly. Here a bin begins with the oldest item, takes the longest that fits until one more
would end it, and ends, where it can, with two items that fill it exactly. Filling stops while there
is still much to choose from: the rest of the buffer meets the items that come next. Nobody waits
for long, since whoever is oldest is next. What is left at the end of a source is packed decreasing.

Which pairs fill a space exactly is known from two bit sets, of the lengths that are present and of
the same lengths counted from the other end: shifted by the space and laid over each other, they
have a bit in common for every such pair.
"""

import heapq
from bisect import bisect_left, bisect_right, insort
from typing import Sequence

import numpy as np

from energon_ext.errors import ConfigError, SampleError


def fill_bins(
    lengths: np.ndarray, capacity: int, *, keep: int = 0, max_items_per_bin: int | None = None
) -> tuple[np.ndarray, list[int]]:
    """Fill bins from a buffer, and leave ``keep`` items for the next one.

    Args:
        lengths: int [n], of each item, oldest first; 1 .. ``capacity``.
        capacity: of a bin.
        keep: stop when no more than so many items are left; 0 places all of them.
        max_items_per_bin: a bin with so many items is full; None for no limit.

    Returns:
        ``(items, ends)``: int64 indices of the items that were placed, bin after bin, and where
        each bin ends among them.

    Raises:
        ConfigError: ``capacity`` or ``max_items_per_bin`` below 1.
        SampleError: a length out of range.

    Example:
        >>> items, ends = fill_bins(np.array([6, 2, 6, 2]), capacity=8)
        >>> [part.tolist() for part in np.split(items, ends[:-1])]
        [[0, 1], [2, 3]]
    """
    most = max_items_per_bin if max_items_per_bin is not None else len(lengths) + 1
    if capacity < 1 or most < 1:
        raise ConfigError(f"capacity {capacity!r} and max_items_per_bin {most!r} must be >= 1.")
    lengths = np.asarray(lengths)
    if not len(lengths):
        return np.zeros(0, np.int64), []
    if lengths.min() < 1 or lengths.max() > capacity:
        raise SampleError(
            f"Items of {lengths.min()} to {lengths.max()} tokens, 1..{capacity} fit into a bin; "
            f"cut them first."
        )
    classes = _Classes(lengths, capacity)
    chosen, ends = _choose_lengths(classes, capacity, len(lengths) - keep, most)
    return classes.oldest_items(np.array(chosen, np.int64)), ends


def best_fit_decreasing(
    lengths: Sequence[int], capacity: int, *, max_items_per_bin: int | None = None
) -> list[list[int]]:
    """Assign items to bins, longest first, each into the fullest bin that still has room.

    Ties go to the fullest bin, then to the lowest index (Johnson, "Near-optimal bin packing
    algorithms", MIT 1973).

    Args:
        lengths: tokens of each item, >= 1 and <= capacity.
        capacity: tokens per bin.
        max_items_per_bin: a bin with so many items is closed; None for no limit.

    Returns:
        One list of item indices per bin; every index exactly once.

    Raises:
        ConfigError: capacity < 1.
        SampleError: an item is empty or longer than the capacity.

    Example:
        >>> best_fit_decreasing([6, 2, 6, 2], capacity=8)
        [[0, 1], [2, 3]]
    """
    if capacity < 1:
        raise ConfigError(f"capacity: {capacity!r} found, >= 1 is needed.")
    for index, length in enumerate(lengths):
        if not 1 <= length <= capacity:
            raise SampleError(
                f"Item {index} has {length} tokens, 1..{capacity} fit into a bin; cut it first."
            )
    bins: list[list[int]] = []
    bins_with_space: dict[int, list[int]] = {}  # free tokens -> heap of bin indices
    spaces: list[int] = []  # the keys of bins_with_space, sorted

    for item in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        length = lengths[item]
        position = bisect_left(spaces, length)
        if position == len(spaces):
            index, space = len(bins), capacity
            bins.append([])
        else:
            space = spaces[position]
            heap = bins_with_space[space]
            index = heapq.heappop(heap)
            if not heap:
                del bins_with_space[space]
                del spaces[position]
        bins[index].append(item)
        left = space - length
        if left and len(bins[index]) != max_items_per_bin:
            if left not in bins_with_space:
                insort(spaces, left)
            heapq.heappush(bins_with_space.setdefault(left, []), index)
    return bins


class _Classes:
    """Items by length; those of one length are taken oldest first."""

    def __init__(self, lengths: np.ndarray, capacity: int):
        narrow = lengths.astype(np.uint16) if capacity < 1 << 16 else lengths  # sorts by radix
        self._order = np.argsort(narrow, kind="stable")
        by_length = lengths[self._order]
        starts, counts = _runs(by_length)
        self._starts, self._lengths = starts, by_length[starts]
        self.distinct: list[int] = self._lengths.tolist()  # present lengths, rising
        self.left: dict[int, int] = dict(zip(self.distinct, counts.tolist()))  # items of each
        bits = np.zeros(capacity + 1, np.uint8)
        bits[self._lengths] = 1
        #: bit ``length``, and bit ``capacity - length``, of each length that is present
        self.present, self.mirrored = _as_integer(bits), _as_integer(bits[::-1])
        self.length_of: list[int] = lengths.tolist()  # of each item, oldest first
        left_with = np.empty(len(lengths), np.int64)
        left_with[self._order] = np.repeat(starts + counts, counts) - np.arange(len(lengths))
        self.left_with: list[int] = left_with.tolist()  # items of its length while it is there

    def oldest_items(self, chosen: np.ndarray) -> np.ndarray:
        """The item that each chosen length stands for."""
        by_length = np.argsort(chosen, kind="stable")
        lengths = chosen[by_length]
        starts, counts = _runs(lengths)
        first = self._starts[np.searchsorted(self._lengths, lengths[starts])]
        items = np.empty(len(chosen), np.int64)
        items[by_length] = self._order[np.repeat(first - starts, counts) + np.arange(len(chosen))]
        return items


def _choose_lengths(
    classes: _Classes, capacity: int, wanted: int, most: int
) -> tuple[list[int], list[int]]:
    """The lengths of the bins one after another, and where each bin ends.

    Every item costs the few operations of the inner loop, so nothing in it is a call of ours.
    """
    distinct, left = classes.distinct, classes.left
    present, mirrored = classes.present, classes.mirrored
    length_of, left_with = classes.length_of, classes.left_with
    chosen: list[int] = []
    ends: list[int] = []
    take = chosen.append
    oldest = 0
    shortest = distinct[0]
    while len(chosen) < wanted:
        length = length_of[oldest]
        while left[length] < left_with[oldest]:
            oldest += 1
            length = length_of[oldest]
        space, full_at = capacity, len(chosen) + most
        position = bisect_right(distinct, length) - 1
        pair = 0
        while True:
            take(length)
            space -= length
            left[length] = still_left = left[length] - 1
            if not still_left:
                del distinct[position]
                present ^= 1 << length
                mirrored ^= 1 << (capacity - length)
                if not distinct:
                    break
                shortest = distinct[0]
            if pair:  # the longer one was taken, this is its partner
                length, pair = pair, 0
                position = bisect_right(distinct, length) - 1
                continue
            if space < shortest or len(chosen) == full_at:
                break
            position = bisect_right(distinct, space) - 1
            length = distinct[position]
            if space - shortest < length < space and full_at - len(chosen) > 1:
                pairs = present & (mirrored >> (capacity - space))
                longer = pairs.bit_length() - 1
                if pairs and (longer * 2 != space or left[longer] > 1):
                    length, pair = longer, space - longer
                    position = bisect_right(distinct, length) - 1
        ends.append(len(chosen))
    return chosen, ends


def _runs(ordered: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where each run of equal values begins, and how long it is."""
    is_first = np.ones(len(ordered), bool)
    np.not_equal(ordered[1:], ordered[:-1], out=is_first[1:])
    starts = np.flatnonzero(is_first)
    return starts, np.concatenate((starts[1:], [len(ordered)])) - starts


def _as_integer(bits: np.ndarray) -> int:
    return int.from_bytes(np.packbits(bits, bitorder="little").tobytes(), "little")
