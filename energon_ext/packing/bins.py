# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""A closed set of items into as few bins as possible; what is left at the end of a source."""

import heapq
from bisect import bisect_left, insort
from typing import Sequence

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
