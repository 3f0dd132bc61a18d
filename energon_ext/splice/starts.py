# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The starts in a document that its quota shows: evenly, or more often at its edges."""

import numpy as np


def quantile_numbers(
    totals: np.ndarray, quotas: np.ndarray, numbers: np.ndarray, phases: np.ndarray
) -> np.ndarray:
    """Spread picks evenly over things: floor of ``total * (number + phase) / quota``.

    Each thing is picked equally often where the quota is a multiple of the total.

    Args:
        totals, quotas: int64 [n]; quotas up to 2^31, or equal to the total.
        numbers: of the pick, in ``[0, quota)``.
        phases: float [n], in ``[0, 1)``.

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


class EdgeWeights:
    """The distribution of starts by which the edges of a document come more often.

    With every start equally likely, a token near an edge is in fewer contents than one inside. A
    start at distance ``d(t) = min(t + 1, (L - K) - t + 1, K)`` from an edge gets the weight
    ``(K / d(t))^alpha``. Weights fall from one edge to 1, stay there, and rise to the other, so a
    sum of them is two table look-ups: about K numbers serve documents of any length.
    """

    def __init__(self, content_length: int, content_stride: int, alpha: float):
        self._content, self._stride, self._alpha = content_length, content_stride, alpha
        self._steps = -(-content_length // content_stride)
        # So far from an edge and further, all starts weigh the same.
        self._furthest = min(content_stride - 1, content_length)
        nearest = np.arange(self._furthest + 1)[:, None]
        weights = self._weights(nearest + np.arange(self._steps) * content_stride)
        self._sums = np.pad(weights.cumsum(axis=1), ((0, 0), (1, 0)))

    def rows(self, last_starts: np.ndarray, fractions: np.ndarray) -> np.ndarray:
        """Starts, divided by the stride, at which the cumulative weight passes fractions of all.

        Args:
            last_starts: int64 [n], L - K.
            fractions: float [n], in [0, 1).
        """
        low, high = np.zeros_like(last_starts), last_starts // self._stride
        target = fractions * self._of_first(last_starts, high + 1)
        while bool((low < high).any()):
            middle = (low + high) // 2
            passed = self._of_first(last_starts, middle + 1) > target
            high = np.where(passed, middle, high)
            low = np.where(passed, low, middle + 1)
        return low

    def of(self, last_start: int) -> np.ndarray:
        """The weight of every start of a document, float [starts]."""
        starts = np.arange(0, last_start + 1, self._stride)
        return self._weights(np.minimum(starts, last_start - starts))

    def _weights(self, to_an_edge: np.ndarray) -> np.ndarray:
        return (self._content / np.minimum(to_an_edge + 1, self._content)) ** self._alpha

    def _of_first(self, last_starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Weight of the first ``counts`` starts: those of the left half, then of the right."""
        rows = last_starts // self._stride + 1
        left = last_starts // 2 // self._stride + 1  # starts nearer to the first edge
        remainder = last_starts % self._stride  # from the last start to the last edge
        after = self._from_edge(remainder, rows - np.maximum(counts, left))
        right = self._from_edge(remainder, rows - left) - after
        return self._from_edge(0, np.minimum(counts, left)) + right

    def _from_edge(self, remainder: np.ndarray | int, counts: np.ndarray) -> np.ndarray:
        """Weight of the ``counts`` starts nearest to an edge, the first ``remainder`` from it."""
        row = np.minimum(remainder, self._furthest)
        return self._sums[row, np.minimum(counts, self._steps)] + np.maximum(
            counts - self._steps, 0
        )
