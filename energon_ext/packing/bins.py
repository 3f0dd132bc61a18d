# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Bin packing: place items of given lengths into bins of one capacity."""

import heapq
import itertools
from bisect import bisect_left, insort
from collections import defaultdict
from typing import Iterable, Sequence

import numpy as np


def best_fit(
    lengths: Sequence[int],
    capacity: int,
    max_items_per_bin: int | None = None,
    kinds: Sequence[int] | None = None,
) -> np.ndarray:
    """Place items in the given order, each into the fullest bin that still has room.

    Among equally full bins the first one is used. With the longest items first, this is best-fit
    decreasing (Johnson, "Near-optimal bin packing algorithms", MIT 1973).

    Args:
        lengths: tokens of each item, >= 1 and <= capacity.
        capacity: tokens per bin.
        max_items_per_bin: a bin with this many items is closed; None for no limit.
        kinds: the kind of each item, or -1. No bin gets two items of a kind other than -1.

    Returns:
        The bin of each item, int64 [items]; bins are numbered in the order they are opened.

    Example:
        >>> best_fit([6, 6, 2, 2], capacity=8).tolist()
        [0, 1, 0, 1]
        >>> best_fit([6, 6, 2, 2], capacity=8, kinds=[-1, 3, -1, 3]).tolist()
        [0, 1, 0, 2]
    """
    bin_of: list[int] = []
    counts: list[int] = []  # items of each bin, if they are limited
    bins_with_space: dict[int, list[int]] = {}  # free tokens -> heap of bins
    spaces: list[int] = []  # the keys of bins_with_space, sorted
    for length, avoided in zip(lengths, _bins_of_kinds(kinds)):
        position = bisect_left(spaces, length)
        if avoided:
            while position < len(spaces) and avoided.issuperset(bins_with_space[spaces[position]]):
                position += 1
        if position == len(spaces):
            number, space = len(counts), capacity
            counts.append(0)
        else:
            space = spaces[position]
            heap = bins_with_space[space]
            number = _pop(heap, avoided) if avoided else heapq.heappop(heap)
            if not heap:
                del bins_with_space[space]
                del spaces[position]
        if avoided is not None:
            avoided.add(number)
        bin_of.append(number)
        left = space - length
        if max_items_per_bin is not None:
            counts[number] += 1
            if counts[number] == max_items_per_bin:
                continue
        if left:
            if left in bins_with_space:
                heapq.heappush(bins_with_space[left], number)
            else:
                bins_with_space[left] = [number]
                insort(spaces, left)
    return np.array(bin_of, np.int64)


def best_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Return the numbers of the items in each bin, with the longest items placed first.

    Example:
        >>> best_fit_decreasing([2, 6, 2, 6], capacity=8)
        [[1, 0], [3, 2]]
    """
    ordered = sorted(range(len(lengths)), key=lambda item: -lengths[item])
    bins: dict[int, list[int]] = {}
    for item, number in zip(ordered, best_fit([lengths[n] for n in ordered], capacity).tolist()):
        bins.setdefault(number, []).append(item)
    return list(bins.values())


def _bins_of_kinds(kinds: Sequence[int] | None) -> Iterable[set[int] | None]:
    """Return a set for each item, shared by the items of a kind; None for items of no kind."""
    if kinds is None:
        return itertools.repeat(None)
    bins = defaultdict[int, set[int]](set)
    return [None if kind < 0 else bins[kind] for kind in kinds]


def _pop(heap: list[int], avoided: set[int]) -> int:
    """Remove and return the first bin of a heap that is not among the avoided ones."""
    number = min(each for each in heap if each not in avoided)
    heap.remove(number)
    heapq.heapify(heap)
    return number
