# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Items of given lengths into bins of one capacity."""

import heapq
from bisect import bisect_left, insort
from typing import Sequence

import numpy as np

from energon_ext.errors import ConfigError, SampleError


def best_fit_decreasing(
    lengths: Sequence[int], capacity: int, *, max_items_per_bin: int | None = None
) -> list[list[int]]:
    """Assign items to bins, longest first, each into the fullest bin that still has room.

    Ties go to the fullest bin, then to the lowest index (Johnson, "Near-optimal bin packing
    algorithms", MIT 1973).

    Args:
        lengths: tokens of each item, >= 1 and <= capacity.
        capacity: tokens per bin.
        max_items_per_bin: a bin with this many items is closed; None for no limit.

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
    if lengths and not 1 <= min(lengths) <= max(lengths) <= capacity:
        raise SampleError(
            f"Items of {min(lengths)} to {max(lengths)} tokens, 1..{capacity} fit into a bin; cut "
            f"them first."
        )
    order = longest_first(np.array(lengths, np.int64)).tolist()
    bin_of = best_fit([lengths[item] for item in order], capacity, max_items_per_bin)
    bins: dict[int, list[int]] = {}
    for item, number in zip(order, bin_of.tolist()):
        bins.setdefault(number, []).append(item)
    return list(bins.values())


def longest_first(lengths: np.ndarray) -> np.ndarray:
    """Indices of items by falling length; equals in their order."""
    return np.argsort(-lengths, kind="stable")


def best_fit(lengths: Sequence[int], capacity: int, max_items_per_bin: int | None) -> np.ndarray:
    """Place items in the given order, each into the fullest bin that still has room.

    Returns:
        The bin of each item, int64; bins are numbered as they are opened.
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
