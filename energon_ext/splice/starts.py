# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Distributes the starts in a document, evenly or with more of them near its edges."""

from typing import Callable

import numpy as np

from energon_ext.elementwise import power

#: Any first N multiples of the golden ratio, modulo 1, fill [0, 1) evenly.
GOLDEN = (5**0.5 - 1) / 2


def quantile_numbers(
    totals: np.ndarray, quotas: np.ndarray, numbers: np.ndarray, phases: np.ndarray
) -> np.ndarray:
    """Spread ``quota`` picks evenly over items: floor of ``total * (number + phase) / quota``.

    If the quota is a multiple of the total, each item is picked equally often. Quotas are at most
    2^31 or equal to the total, numbers of picks in ``[0, quota)``, phases in ``[0, 1)``.

    Example:
        >>> for phase in (0.0, 0.6):
        ...     picks = quantile_numbers(*map(np.array, ([5] * 3, [3] * 3, [0, 1, 2], [phase] * 3)))
        ...     print(picks.tolist())
        [0, 1, 3]
        [1, 2, 4]
    """
    begins = np.minimum((totals * phases).astype(np.int64), totals - 1)
    whole, rest = np.divmod(totals, quotas)
    # (total * number + begin) // quota, without a product that may overflow.
    return whole * numbers + (rest * numbers + begins) // quotas


def first_true(condition: Callable[[np.ndarray], np.ndarray], most: np.ndarray) -> np.ndarray:
    """Return the smallest integers in ``[0, most]`` that meet a condition, by bisection.

    The condition must be monotonic. If no integer meets it, the result is ``most``.
    """
    low, high = np.zeros_like(most), most
    while bool((low < high).any()):
        middle = (low + high) // 2
        is_true = condition(middle)
        high = np.where(is_true, middle, high)
        low = np.where(is_true, low, middle + 1)
    return low


class EdgeWeights:
    """A distribution of starts that prefers the edges of a document.

    If every start is equally likely, a token near an edge is in fewer contents than one inside. So
    a start that is d - 1 tokens from the nearer of the first and the last start gets the weight
    ``(K / min(d, K))^alpha``. Weights fall from one edge to 1, stay there, and rise to the other
    edge, so any sum takes two look-ups in a table of K numbers, for documents of any length.
    """

    def __init__(self, content_length: int, content_stride: int, alpha: float):
        distances = np.arange(0, content_length, content_stride) + 1
        self._weights = np.append(power(content_length / distances, alpha), 1.0)
        self._sums = np.pad(self._weights[:-1].cumsum(), (1, 0))
        self._steps = len(distances)  # from this distance on, all starts have the same weight

    def rows(self, counts: np.ndarray, fractions: np.ndarray) -> np.ndarray:
        """Return the starts, of ``counts``, at which the weight passes fractions of the total."""
        target = fractions * self._first_sum(counts, counts)
        return first_true(lambda row: self._first_sum(counts, row + 1) > target, counts - 1)

    def weights(self, count: int) -> np.ndarray:
        """Return the weight of every start of a document, float [starts]."""
        rows = np.arange(count)
        return self._weights[np.minimum(np.minimum(rows, rows[::-1]), self._steps)]

    def _first_sum(self, counts: np.ndarray, firsts: np.ndarray) -> np.ndarray:
        """Return the total weight of the first starts: those in the left half, then the right."""
        left = (counts + 1) // 2
        after = self._edge_sum(counts - np.maximum(firsts, left))
        right = self._edge_sum(counts - left) - after
        return self._edge_sum(np.minimum(firsts, left)) + right

    def _edge_sum(self, counts: np.ndarray) -> np.ndarray:
        """Return the total weight of the starts nearest to an edge."""
        further = np.maximum(counts - self._steps, 0)
        return self._sums[np.minimum(counts, self._steps)] + further
