# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Which starts a document gets for its share of an epoch: evenly, or more often at its edges."""

import numpy as np

from energon_ext.documents.permutation import keyed_draws
from energon_ext.errors import ConfigError

#: Products of two counts must stay below this to be exact in int64.
_EXACT = 2**62

#: Epochs after which phases begin anew, if they have not been everywhere before.
_MOST_IN_A_ROUND = 2**31


def quantile_numbers(
    totals: np.ndarray, quotas: np.ndarray, numbers: np.ndarray, phases: np.ndarray
) -> np.ndarray:
    """Spread picks evenly over things: floor of ``(total * number + phase) / quota``.

    Each thing is picked equally often where the quota is a multiple of the total.

    Args:
        totals, quotas: int64 [n].
        numbers: of the pick, in ``[0, quota)``.
        phases: in ``[0, total)``.

    Example:
        >>> for phase in (0, 3):
        ...     picks = quantile_numbers(*map(np.array, ([5] * 3, [3] * 3, [0, 1, 2], [phase] * 3)))
        ...     print(picks.tolist())
        [0, 1, 3]
        [1, 2, 4]
    """
    spread = (totals * numbers + phases) // quotas
    return np.where(totals == quotas, numbers, spread)


class Phases:
    """Where the quantiles of each document begin in an epoch.

    Phases go round in steps of a quota, in a scattered order. So in each round of
    ``ceil(whole / quota)`` epochs, counted from epoch 0, every stretch of ``quota`` phases has one:
    as quantiles of equal parts they pick every thing at least once. Each round begins at a place
    drawn anew.

    Args:
        wholes: int64 [documents], phases that there are; >= 1.
        quotas: int64 [documents], picks in an epoch; >= 1.
        key: names the places where rounds begin.
    """

    def __init__(self, wholes: np.ndarray, quotas: np.ndarray, key: str):
        self._wholes, self._quotas, self._key = wholes, quotas, key
        self._rounds = np.minimum(-(-wholes // quotas), _MOST_IN_A_ROUND)
        self._steps = scattered_steps(self._rounds)

    def of(self, documents: np.ndarray, epochs: np.ndarray) -> np.ndarray:
        """The phases of some documents in some epochs, int64 [n]."""
        wholes, rounds = self._wholes[documents], self._rounds[documents]
        turns = epochs // rounds
        places = (epochs - turns * rounds) * self._steps[documents] % rounds
        bounds = np.minimum(wholes, _MOST_IN_A_ROUND)
        begins = keyed_draws(turns * len(self._wholes) + documents, bounds, self._key)
        return (begins + places * self._quotas[documents]) % wholes


def scattered_steps(counts: np.ndarray) -> np.ndarray:
    """A step for each count that goes through all places of a circle, neighbours far apart.

    Near the golden section of the circle, and without a common divisor.

    Example:
        >>> scattered_steps(np.array([1, 2, 5, 8, 1000])).tolist()
        [1, 1, 3, 5, 619]
    """
    steps = np.maximum(1, (counts * 0.6180339887498949).round().astype(np.int64))
    while (common := np.flatnonzero(np.gcd(steps, counts) != 1)).size:
        steps[common] += 1
    return steps


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
    """The distribution of starts by which the edges of a document come more often.

    With every start equally likely, a token near an edge is in fewer contents than one inside. A
    start at distance ``d(t) = max(1, min(t + 1, (L - K) - t + 1, K))`` from an edge gets the weight
    ``(K / d(t))^alpha``. Weights rise from one edge, are 1 between, and fall to the other, so sums
    of them are two table look-ups: K numbers serve documents of any length.
    """

    def __init__(self, content_length: int, content_stride: int, alpha: float):
        self._content, self._stride, self._alpha = content_length, content_stride, alpha
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

    def of(self, last_start: int) -> np.ndarray:
        """The weight of every start of a document, float [starts]."""
        starts = np.arange(0, last_start + 1, self._stride)
        to_an_edge = np.minimum(starts, last_start - starts) + 1
        return (self._content / np.minimum(to_an_edge, self._content)) ** self._alpha

    def totals(self, last_starts: np.ndarray) -> np.ndarray:
        """The weight of all starts of documents, float [n]."""
        rows = last_starts // self._stride + 1
        left = last_starts // 2 // self._stride + 1
        return self._sum(0, left) + self._sum(last_starts % self._stride, rows - left)

    def _sum(self, remainder: np.ndarray | int, count: np.ndarray) -> np.ndarray:
        """Weight of the ``count`` starts nearest to an edge, the first ``remainder`` from it."""
        row = np.minimum(remainder, self._furthest)
        return self._sums[row, np.minimum(count, self._steps)] + np.maximum(count - self._steps, 0)
