# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Choice by what was consumed: the source that is furthest behind its target is next."""

from __future__ import annotations

import heapq
from typing import Any, Mapping, Sequence

from energon_ext.choosers.base import Chooser, UniformStream, nothing_to_draw
from energon_ext.errors import ConfigError

NEW_SOURCES = ("baseline", "zero")

_FOREVER = 2**62


class LeastConsumedChooser(Chooser):
    """Draws the source with the fewest tokens, or the fewest for its weight.

    Every source has a clock that advances by ``tokens / weight`` when it is read, and the source
    whose clock is furthest behind is next (start-time fair queueing; Goyal, Vin and Cheng, 1996).
    With equal weights clocks are token counts. While weights are constant, for any two sources::

        |tokens_i / w_i - tokens_j / w_j| <= longest_i / w_i + longest_j / w_j

    over any window, where ``longest`` is their longest sample. As weights move, shares move with
    them; nothing of the past is made up for. A source of weight 0 sits out, and comes back at the
    clock of the furthest behind, so that it neither starves the others nor is starved.

    Where samples have one length, clocks are compared half a sample ahead, by
    ``clock + sample_tokens / (2 * weight)`` (Webster's rule of apportionment), which keeps every
    source within about one sample of its target. With equal weights that changes nothing.

    Ties are broken at random. A draw costs O(log n).

    Args:
        keys, weights, seed: as for every chooser; weights are target shares of tokens.
        counts: tokens consumed so far. A source that is missing here starts as ``new_source`` says.
        sample_tokens: tokens of a sample, where all have about as many; 0 where they differ.
        new_source: where a source starts that the counts, or a restored state, do not know:
            ``baseline``, level with the source that is furthest behind, or ``zero``.

    Example:
        >>> chooser = LeastConsumedChooser(["a", "b"], counts={"a": 0, "b": 100})
        >>> order = []
        >>> for _ in range(3):
        ...     order.append(chooser.choose())
        ...     chooser.consume(order[-1], tokens=2)
        >>> order, chooser.counts
        (['a', 'a', 'a'], {'a': 6, 'b': 100})
    """

    def __init__(
        self,
        keys: Sequence[str],
        weights: Sequence[Any] | None = None,
        *,
        seed: int | str = 0,
        counts: Mapping[str, int] | None = None,
        sample_tokens: int = 0,
        new_source: str = "baseline",
    ):
        if new_source not in NEW_SOURCES:
            raise ConfigError(f"new_source: {new_source!r} found, {' or '.join(NEW_SOURCES)}.")
        super().__init__(keys, weights, seed=seed, counts=counts)
        self.new_source = new_source
        self._ties = UniformStream(self.seed)
        self._constant_rates = {
            key: 1.0 / weight.evaluate(0)
            for key, weight in self.weights.items()
            if not weight.knots() and weight.evaluate(0) > 0
        }
        self._may_sit_out = [k for k, w in self.weights.items() if w.bounds(0, _FOREVER)[0] == 0]
        self._batch_index = 0
        self._half_sample = 0.5 * sample_tokens
        self._at_rest: set[str] = set()
        self._clocks = {
            key: self.counts[key] / (self.weights[key].evaluate(0) or 1.0)
            for key in self.keys
            if key in (counts or {})
        }
        self._welcome_new_sources()
        self._build_heap({})

    def choose(self, batch_index: int = 0) -> str:
        if batch_index != self._batch_index:
            self._batch_index = batch_index
            self._update_who_sits_out()
        if not self._heap:
            raise ConfigError(nothing_to_draw(self, batch_index))
        return self._heap[0][2]

    def consume(self, key: str, tokens: int) -> None:
        heap = self._heap
        if heap[0][2] != key:
            raise ConfigError(f"consume({key!r}): only what choose() returned can be consumed.")
        self.counts[key] += tokens
        rate = self._constant_rates.get(key) or 1.0 / self.weights[key].evaluate(self._batch_index)
        clock = self._clocks[key] = self._clocks[key] + tokens * rate
        ahead = clock + self._half_sample * rate
        heapq.heapreplace(heap, (ahead, self._ties.next(), key))

    def drop(self, key: str) -> None:
        super().drop(key)
        self._build_heap(self._turns())

    def revive(self) -> None:
        back = sorted(self._dropped)
        baseline = self._furthest_behind()
        super().revive()
        for key in back:
            self._clocks[key] = max(self._clocks[key], baseline)
        self._build_heap(self._turns())

    def save_state(self) -> dict[str, Any]:
        return {
            **super().save_state(),
            "ties_drawn": self._ties.position,
            "turns": self._turns(),
            "clocks": dict(self._clocks),
            "at_rest": sorted(self._at_rest),
            "batch_index": self._batch_index,
        }

    def restore_state(self, state: Mapping[str, Any]) -> None:
        super().restore_state(state)
        self._clocks = {key: state["clocks"][key] for key in self.keys if key in state["clocks"]}
        self._at_rest = set(state["at_rest"]) & set(self.keys)
        self._batch_index = state["batch_index"]
        self._ties.position = state["ties_drawn"]
        self._welcome_new_sources()
        self._build_heap(state["turns"])

    def _welcome_new_sources(self) -> None:
        baseline = self._furthest_behind() if self.new_source == "baseline" else 0.0
        for key in self.keys:
            if key not in self._clocks:
                self._clocks[key] = baseline
                self.counts[key] = round(baseline * self.weights[key].evaluate(self._batch_index))
        self._update_who_sits_out(build=False)

    def _update_who_sits_out(self, build: bool = True) -> None:
        """Let sources rest whose weight became 0, and come back those that have one again."""
        at_rest = {
            key for key in self._may_sit_out if self.weights[key].evaluate(self._batch_index) == 0
        }
        if at_rest == self._at_rest:
            return
        baseline = self._furthest_behind()
        for key in self._at_rest - at_rest:
            self._clocks[key] = max(self._clocks[key], baseline)
        self._at_rest = at_rest
        if build:
            self._build_heap(self._turns())

    def _furthest_behind(self) -> float:
        active = self._clocks.keys() - self._at_rest - self._dropped
        return min((self._clocks[key] for key in active), default=0.0)

    def _turns(self) -> dict[str, list[float]]:
        """What each source in line is compared by, as it was when the source was last read."""
        return {key: [ahead, tie] for ahead, tie, key in self._heap}

    def _build_heap(self, turns: Mapping[str, Sequence[float]]) -> None:
        """Line up the active sources; those without a turn get one."""
        self._heap = []
        for key in self.keys:
            if key in self._dropped or key in self._at_rest:
                continue
            if key in turns:
                ahead, tie = turns[key]
            else:
                rate = 1.0 / self.weights[key].evaluate(self._batch_index)
                ahead, tie = self._clocks[key] + self._half_sample * rate, self._ties.next()
            self._heap.append((ahead, tie, key))
        heapq.heapify(self._heap)
