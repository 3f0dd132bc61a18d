# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Which starts a document gets for its share of an epoch: evenly, or more often at its edges."""

import numpy as np

from energon_ext.arguments import check_integer, check_number
from energon_ext.errors import ConfigError

#: Products of two counts must stay below this to be exact in int64.
_EXACT = 2**62


def quantile_numbers(totals: np.ndarray, quotas: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Spread ``quota`` picks evenly over ``total`` things: floor of total * (number + 1/2) / quota.

    Each thing is picked equally often where the quota is a multiple of the total.

    Example:
        >>> quantile_numbers(np.array([2] * 4), np.array([4] * 4), np.arange(4)).tolist()
        [0, 0, 1, 1]
    """
    spread = (2 * numbers + 1) * totals // (2 * quotas)
    return np.where(totals == quotas, numbers, spread)


def check_exact(totals: np.ndarray, quotas: np.ndarray) -> None:
    """Refuse counts that :func:`quantile_numbers` could not multiply."""
    products = np.where(totals == quotas, 0.0, totals.astype(float) * quotas)
    if products.size and float(products.max()) >= _EXACT / 2:
        raise ConfigError(
            f"epoch_length gives a document {int(quotas[products.argmax()])} examples of "
            f"{int(totals[products.argmax()])} pairs, too many to spread exactly; use a shorter "
            f"epoch."
        )


class EdgeWeights:
    """The distribution of starts that makes up for the edges of a document.

    With every start equally likely, a token near an edge is in fewer contents than one inside. A
    start at distance ``d(t) = max(1, min(t + 1, (L - K) - t + 1, K))`` from an edge gets the weight
    ``(K / d(t))^alpha``. Weights rise from one edge, are 1 between, and fall to the other, so sums
    of them are two table look-ups: K numbers serve documents of any length.
    """

    def __init__(self, content_length: int, content_stride: int, alpha: float):
        self._stride = content_stride
        self._steps = -(-content_length // content_stride)
        # So far from an edge and further, all starts weigh the same.
        self._furthest = min(content_stride - 1, content_length)
        begins = np.arange(self._furthest + 1)[:, None]
        distances = np.arange(self._steps) * content_stride + begins + 1
        weights = (content_length / np.minimum(distances, content_length)) ** alpha
        self._sums = np.zeros((len(begins), self._steps + 1))
        np.cumsum(weights, axis=1, out=self._sums[:, 1:])

    def rows(self, last_starts: np.ndarray, fractions: np.ndarray) -> np.ndarray:
        """Starts, divided by the stride, at which the cumulative weight passes fractions of all.

        Args:
            last_starts: int64 [n], L - K.
            fractions: float [n], in [0, 1).
        """
        rows = last_starts // self._stride + 1
        left = last_starts // 2 // self._stride + 1  # starts nearer to the first edge
        remainder = last_starts % self._stride  # from the last start to the last edge
        right = self._sum(remainder, rows - left)
        target = fractions * (self._sum(0, left) + right)
        low, high = np.zeros_like(rows), rows - 1
        while bool((low < high).any()):
            middle = (low + high) // 2
            end = middle + 1
            reached = self._sum(0, np.minimum(end, left)) + (
                right - self._sum(remainder, rows - np.maximum(end, left))
            )
            passed = reached > target
            high = np.where(passed, middle, high)
            low = np.where(passed, low, middle + 1)
        return low

    def _sum(self, remainder: np.ndarray | int, count: np.ndarray) -> np.ndarray:
        """Weight of the ``count`` starts nearest to an edge, the first ``remainder`` from it."""
        row = np.minimum(remainder, self._furthest)
        return self._sums[row, np.minimum(count, self._steps)] + np.maximum(count - self._steps, 0)


def start_positions(
    doc_len: int, content_length: int, quota: int, alpha: float = 0.0, content_stride: int = 1
) -> np.ndarray:
    """Choose ``quota`` starts of a document by quantiles of their distribution.

    The k-th is where the cumulative weight of the starts ``0, stride, ..., <= L - K`` passes
    ``(k + 1/2) / quota``; see :class:`EdgeWeights` for the weights.

    Args:
        doc_len: L, tokens.
        content_length: K, 1 .. L tokens.
        quota: how many starts, >= 0.
        alpha: 0 for equal weights, which are then exact.
        content_stride: step of t.

    Returns:
        int64 [quota], ascending.

    Raises:
        ConfigError: a value out of range.

    Example:
        >>> start_positions(doc_len=10, content_length=4, quota=7).tolist()
        [0, 1, 2, 3, 4, 5, 6]
        >>> start_positions(doc_len=10, content_length=4, quota=4, alpha=2.0).tolist()
        [0, 1, 5, 6]
    """
    check_integer("doc_len", doc_len, 1)
    check_integer("content_length", content_length, 1)
    check_integer("quota", quota, 0)
    check_integer("content_stride", content_stride, 1)
    check_number("alpha", alpha)
    if content_length > doc_len:
        raise ConfigError(
            f"content_length: {content_length} found, the document has {doc_len} tokens; at most "
            f"so many are allowed."
        )
    numbers = np.arange(quota)
    quotas = np.full_like(numbers, quota)
    last_starts = np.full_like(numbers, doc_len - content_length)
    if alpha == 0:
        totals = last_starts // content_stride + 1
        check_exact(totals, quotas)
        return quantile_numbers(totals, quotas, numbers) * content_stride
    weights = EdgeWeights(content_length, content_stride, alpha)
    return weights.rows(last_starts, quantiles(quotas, numbers)) * content_stride


def quantiles(quotas: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """The middles of ``quota`` equal parts of [0, 1), float [n]."""
    return (numbers + 0.5) / quotas
