# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The starts in a document that its quota shows: evenly, or more often at its edges."""

from typing import Callable

import numpy as np


def quantile_numbers(
    totals: np.ndarray, quotas: np.ndarray, numbers: np.ndarray, phases: np.ndarray
) -> np.ndarray:
    """Spread picks evenly over things: floor of ``total * (number + phase) / quota``.

    Each thing is picked equally often where the quota is a multiple of the total. Quotas are up to
    2^31 or equal to the total, numbers of a pick in ``[0, quota)``, phases in ``[0, 1)``.

    Example:
        >>> for phase in (0.0, 0.6):
        ...     picks = quantile_numbers(*map(np.array, ([5] * 3, [3] * 3, [0, 1, 2], [phase] * 3)))
        ...     print(picks.tolist())
        [0, 1, 3]
        [1, 2, 4]
    """
    begins = np.minimum((totals * phases).astype(np.int64), totals - 1)
    whole, rest = np.divmod(totals, quotas)
    # (total * number + begin) // quota, without the product that may be too large.
    return whole * numbers + (rest * numbers + begins) // quotas


def first_that(holds: Callable[[np.ndarray], np.ndarray], most: np.ndarray) -> np.ndarray:
    """The least integers in ``[0, most]`` for which a condition holds, by bisection.

    It holds for every integer after the first one; where it never does, that is ``most``.
    """
    low, high = np.zeros_like(most), most
    while bool((low < high).any()):
        middle = (low + high) // 2
        found = holds(middle)
        high = np.where(found, middle, high)
        low = np.where(found, low, middle + 1)
    return low


class EdgeWeights:
    """The distribution of starts by which the edges of a document come more often.

    With every start equally likely, a token near an edge is in fewer contents than one inside. A
    start that is d - 1 tokens from the first or the last start, the nearer one, gets the weight
    ``(K / min(d, K))^alpha``. Weights fall from one edge to 1, stay there, and rise to the other,
    so a sum of them is two table look-ups: K numbers at most serve documents of any length.
    """

    def __init__(self, content_length: int, content_stride: int, alpha: float):
        distances = np.arange(0, content_length, content_stride) + 1
        self._weights = np.append((content_length / distances) ** alpha, 1.0)
        self._sums = np.pad(self._weights[:-1].cumsum(), (1, 0))
        self._steps = len(distances)  # so far from an edge and further, all starts weigh the same

    def rows(self, counts: np.ndarray, fractions: np.ndarray) -> np.ndarray:
        """Numbers of the starts, of ``counts``, at which the weight passes fractions of all."""
        target = fractions * self._of_first(counts, counts)
        return first_that(lambda row: self._of_first(counts, row + 1) > target, counts - 1)

    def of(self, count: int) -> np.ndarray:
        """The weight of every start of a document, float [starts]."""
        rows = np.arange(count)
        return self._weights[np.minimum(np.minimum(rows, rows[::-1]), self._steps)]

    def _of_first(self, counts: np.ndarray, firsts: np.ndarray) -> np.ndarray:
        """Weight of some first starts: those of the left half, then of the right."""
        left = (counts + 1) // 2
        after = self._from_edge(counts - np.maximum(firsts, left))
        right = self._from_edge(counts - left) - after
        return self._from_edge(np.minimum(firsts, left)) + right

    def _from_edge(self, counts: np.ndarray) -> np.ndarray:
        """Weight of the starts nearest to an edge."""
        further = np.maximum(counts - self._steps, 0)
        return self._sums[np.minimum(counts, self._steps)] + further
