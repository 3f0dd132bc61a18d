# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Items of known lengths into bins of one capacity."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from typing import Iterator, Sequence

from energon_ext.errors import ConfigError, SampleError


def cut_into_pieces(length: int, longest: int) -> Iterator[tuple[int, int]]:
    """Token ranges of at most ``longest`` tokens that share their boundary token.

    Example:
        >>> list(cut_into_pieces(9, 4))
        [(0, 4), (3, 7), (6, 9)]
        >>> list(cut_into_pieces(4, 4))
        [(0, 4)]
    """
    start = 0
    while start + longest < length:
        yield start, start + longest
        start += longest - 1
    yield start, length


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
    bins: list[list[int]] = []
    bins_with_space: dict[int, list[int]] = {}  # free tokens -> heap of bin indices
    spaces: list[int] = []  # the keys of bins_with_space, sorted

    for item in _decreasing(lengths, capacity):
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


def first_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Assign items to bins, longest first, each into the first bin that still has room.

    The bins form a tournament tree on their free tokens, so an item costs O(log bins).

    Args, Returns, Raises: as :func:`best_fit_decreasing`.

    Example:
        >>> first_fit_decreasing([5, 4, 3, 2], capacity=8)
        [[0, 2], [1, 3]]
    """
    order = _decreasing(lengths, capacity)
    leaves = 1 << max(1, (len(order) - 1).bit_length())
    most_space = [capacity] * (2 * leaves)
    bins: list[list[int]] = []
    for item in order:
        length = lengths[item]
        node = 1
        while node < leaves:
            node = 2 * node if most_space[2 * node] >= length else 2 * node + 1
        index = node - leaves
        if index == len(bins):
            bins.append([])
        bins[index].append(item)
        most_space[node] -= length
        while node > 1:
            node //= 2
            most_space[node] = max(most_space[2 * node], most_space[2 * node + 1])
    return bins


def _decreasing(lengths: Sequence[int], capacity: int) -> list[int]:
    if capacity < 1:
        raise ConfigError(f"capacity: {capacity!r} found, >= 1 is needed.")
    for index, length in enumerate(lengths):
        if not 1 <= length <= capacity:
            raise SampleError(
                f"Item {index} has {length} tokens, 1..{capacity} fit into a bin; cut it first."
            )
    return sorted(range(len(lengths)), key=lambda index: -lengths[index])
