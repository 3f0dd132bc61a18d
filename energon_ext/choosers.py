# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Whose turn it is: from the state of a blend to the next source.

A chooser knows keys, weights and counts, and nothing of datasets. Its order depends on its seed,
the set of keys and its state only: keys are sorted, so the order in a YAML file says nothing.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from bisect import bisect_right
from itertools import accumulate
from typing import Any, Mapping, Sequence

from energon_ext.errors import ConfigError, StateFormatError
from energon_ext.weights import WeightSpec, as_weight

STATE_VERSION = 1

#: Random numbers made at a time; a restore makes one block again, whatever was drawn before.
_BLOCK = 1024

#: Batch indices for which bounds of moving weights are laid out at a time.
_WINDOW = 256

#: Numbers drawn in vain before the exact weights are summed.
_MOST_REJECTIONS = 16


class Chooser(ABC):
    """The protocol of a chooser.

    Args:
        keys: names of the sources, each once.
        weights: one number or :class:`~energon_ext.weights.WeightSpec` per key; 1 each by default.
        seed: int or str; decides ties and draws.
        counts: tokens consumed so far by key, 0 by default.
    """

    def __init__(
        self,
        keys: Sequence[str],
        weights: Sequence[Any] | None = None,
        *,
        seed: int | str = 0,
        counts: Mapping[str, int] | None = None,
    ):
        if len(set(keys)) != len(keys) or not keys:
            raise ConfigError(f"A chooser needs distinct keys, got {list(keys)}.")
        if weights is not None and len(weights) != len(keys):
            raise ConfigError(f"{len(keys)} keys, but {len(weights)} weights; give one for each.")
        specs = dict(zip(keys, map(as_weight, weights or [1.0] * len(keys))))
        self.keys = tuple(sorted(keys))
        self.weights: dict[str, WeightSpec] = {key: specs[key] for key in self.keys}
        self.seed = seed
        self.counts: dict[str, int] = {key: int((counts or {}).get(key, 0)) for key in self.keys}
        self._dropped: set[str] = set()

    @abstractmethod
    def choose(self, batch_index: int = 0) -> str:
        """The key whose sample is next.

        Raises:
            ConfigError: no source is left, or all that are left have weight 0 at this index.
        """

    def consume(self, key: str, tokens: int) -> None:
        """Count ``tokens`` for a source that was just read."""
        self.counts[key] += tokens

    def drop(self, key: str) -> None:
        """Take a source out: it has ended, or has nothing for this worker."""
        self._dropped.add(key)

    def revive(self) -> None:
        """Bring all dropped sources back, for another pass."""
        self._dropped.clear()

    @property
    def active_keys(self) -> list[str]:
        """The keys that were not dropped."""
        return [key for key in self.keys if key not in self._dropped]

    def save_state(self) -> dict[str, Any]:
        """The state as JSON values."""
        return {
            "version": STATE_VERSION,
            "counts": dict(self.counts),
            "dropped": sorted(self._dropped),
        }

    def restore_state(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`save_state`. Keys that the state does not know start at 0."""
        if state.get("version") != STATE_VERSION:
            raise StateFormatError(
                f"A chooser state of version {state.get('version')!r} was found, "
                f"{STATE_VERSION} is known; use the energon_ext that wrote it, or a newer one."
            )
        self.counts = {key: int(state["counts"].get(key, 0)) for key in self.keys}
        self._dropped = set(state["dropped"]) & set(self.keys)


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
        self._draws = 0
        self._block: list[float] = []
        self._block_number = -1
        self._forget_window()

    def choose(self, batch_index: int = 0) -> str:
        if not self._first <= batch_index <= self._last:
            self._lay_out_window(batch_index)
        ends, last_interval = self._ends, len(self._ends) - 1
        for _ in range(_MOST_REJECTIONS):
            drawn = self._next_uniform() * ends[-1]
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

    def revive(self) -> None:
        super().revive()
        self._forget_window()

    def save_state(self) -> dict[str, Any]:
        return {**super().save_state(), "draws": self._draws}

    def restore_state(self, state: Mapping[str, Any]) -> None:
        super().restore_state(state)
        self._draws = int(state["draws"])
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
            raise ConfigError(_nothing_to_draw(self, batch_index))
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
            raise ConfigError(_nothing_to_draw(self, batch_index))
        ends = list(accumulate(weight for _, weight in positive))
        drawn = self._next_uniform() * ends[-1]
        return positive[bisect_right(ends, drawn, 0, len(ends) - 1)][0]

    def _next_uniform(self) -> float:
        number, offset = divmod(self._draws, _BLOCK)
        if number != self._block_number:
            numbers = random.Random(f"{self.seed}/{number}")
            self._block = [numbers.random() for _ in range(_BLOCK)]
            self._block_number = number
        self._draws += 1
        return self._block[offset]


def _nothing_to_draw(chooser: Chooser, batch_index: int) -> str:
    if not chooser.active_keys:
        return f"Every source has ended at batch index {batch_index}: {list(chooser.keys)}."
    weights = {key: repr(chooser.weights[key]) for key in chooser.active_keys}
    return (
        f"Every weight is 0 at batch index {batch_index} among the sources this worker has samples "
        f"of: {weights}. Give one of them a weight > 0 there, or use fewer workers."
    )
