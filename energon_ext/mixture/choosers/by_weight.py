# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Random choice by weight."""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from typing import Any, Mapping

from energon_ext.errors import ConfigError
from energon_ext.mixture.choosers.base import Chooser, UniformStream, nothing_to_draw

#: Batch indices for which bounds of moving weights are laid out at a time.
_WINDOW = 512

#: Numbers drawn in vain before the exact weights are summed.
_MOST_REJECTIONS = 16


class RandomChooser(Chooser):
    """Draws a source with probability proportional to its weight at the batch index.

    A weight of 0 is never drawn. The n-th random number depends on the seed and n alone, so the
    state is one integer, and a source that joins does not disturb the numbers of the others.

    Weights that move are drawn by thinning (Lewis and Shedler, 1979): for a window of batch
    indices each source gets an interval as long as the upper bound of its weight there, and a
    number that falls into the interval beyond the weight of the moment is drawn again. So a draw
    costs O(log n), scheduled or not, and nothing is summed anew from index to index.

    Example:
        >>> chooser = RandomChooser(["code", "web"], [0.0, 1.0], seed=1)
        >>> {chooser.choose(batch_index=3) for _ in range(50)}
        {'web'}
    """

    def __init__(self, keys, weights=None, *, seed=0, counts=None):
        super().__init__(keys, weights, seed=seed, counts=counts)
        self._uniforms = UniformStream(self.seed)
        self._forget_window()

    def choose(self, batch_index: int = 0) -> str:
        if not self._first <= batch_index <= self._last:
            self._lay_out_window(batch_index)
        ends, last_interval = self._ends, len(self._ends) - 1
        for _ in range(_MOST_REJECTIONS):
            drawn = self._uniforms.next() * ends[-1]
            # The bound keeps a product that rounded up to the total inside the list.
            index = bisect_right(ends, drawn, 0, last_interval)
            if drawn < self._surely[index]:
                return self._drawable[index]
            key = self._drawable[index]
            if drawn < self._starts[index] + self.weights[key].evaluate(batch_index):
                return key
        return self._choose_among_exact_weights(batch_index)

    def drop(self, key: str) -> None:
        super().drop(key)
        self._forget_window()

    def revive(self, keys=None) -> None:
        super().revive(keys)
        self._forget_window()

    def save_state(self) -> dict[str, Any]:
        return {**super().save_state(), "draws": self._uniforms.position}

    def restore_state(self, state: Mapping[str, Any]) -> None:
        super().restore_state(state)
        self._uniforms.position = int(state["draws"])
        self._forget_window()

    def _forget_window(self) -> None:
        self._first, self._last = 0, -1

    def _lay_out_window(self, batch_index: int) -> None:
        # The window depends on the index alone, so that a resume finds the same intervals.
        self._first = batch_index - batch_index % _WINDOW
        self._last = self._first + _WINDOW - 1
        bounds = [
            (key, *self.weights[key].bounds(self._first, self._last)) for key in self.active_keys
        ]
        drawable = [(key, low, high) for key, low, high in bounds if high > 0]
        if not drawable:
            raise ConfigError(nothing_to_draw(self, batch_index))
        self._drawable = [key for key, _, _ in drawable]
        sums = list(accumulate((high for _, _, high in drawable), initial=0.0))
        self._starts, self._ends = sums[:-1], sums[1:]
        # Below this mark a number is inside the weight at every index of the window.
        self._surely = [
            end if low == high else start + low
            for start, end, (_, low, high) in zip(self._starts, self._ends, drawable)
        ]

    def _choose_among_exact_weights(self, batch_index: int) -> str:
        """For an index at which the weights lie far below their bounds, or are all 0."""
        weighed = [(key, self.weights[key].evaluate(batch_index)) for key in self.active_keys]
        positive = [(key, weight) for key, weight in weighed if weight > 0]
        if not positive:
            raise ConfigError(nothing_to_draw(self, batch_index))
        ends = list(accumulate(weight for _, weight in positive))
        drawn = self._uniforms.next() * ends[-1]
        return positive[bisect_right(ends, drawn, 0, len(ends) - 1)][0]
