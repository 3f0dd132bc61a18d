# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Bin packing: place items of given lengths into bins of one capacity."""

import heapq
from bisect import bisect_left, insort
from typing import Sequence

import numpy as np


def longest_first(lengths: np.ndarray) -> np.ndarray:
    """Return the indices of items from the longest to the shortest; ties keep their order."""
    return np.argsort(-lengths, kind="stable")


def best_fit(
    lengths: Sequence[int], capacity: int, max_items_per_bin: int | None = None
) -> np.ndarray:
    """Place items in the given order, each into the fullest bin that still has room.

    Among equally full bins the first one is used. With items in the order of
    :func:`longest_first` this is best-fit decreasing (Johnson, "Near-optimal bin packing
    algorithms", MIT 1973).

    Args:
        lengths: tokens of each item, >= 1 and <= capacity.
        capacity: tokens per bin.
        max_items_per_bin: a bin with this many items is closed; None for no limit.

    Returns:
        The bin of each item, int64 [items]; bins are numbered in the order they are opened.

    Example:
        >>> best_fit([6, 6, 2, 2], capacity=8).tolist()
        [0, 1, 0, 1]
    """
    bin_of: list[int] = []
    counts: list[int] = []  # items of each bin
    bins_with_space: dict[int, list[int]] = {}  # free tokens -> heap of bins
    spaces: list[int] = []  # the keys of bins_with_space, sorted
    for length in lengths:
        position = bisect_left(spaces, length)
        if position == len(spaces):
            number, space = len(counts), capacity
            counts.append(0)
        else:
            space = spaces[position]
            heap = bins_with_space[space]
            number = heapq.heappop(heap)
            if not heap:
                del bins_with_space[space]
                del spaces[position]
        bin_of.append(number)
        counts[number] += 1
        left = space - length
        if left and counts[number] != max_items_per_bin:
            if left in bins_with_space:
                heapq.heappush(bins_with_space[left], number)
            else:
                bins_with_space[left] = [number]
                insort(spaces, left)
    return np.array(bin_of, np.int64)
