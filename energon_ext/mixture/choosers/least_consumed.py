# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Choice by what was consumed: the source that is furthest behind its target is next."""

from __future__ import annotations

from heapq import heapify, heapreplace
from typing import Any, Iterable, Mapping, Sequence

from energon_ext.errors import ConfigError
from energon_ext.mixture.choosers.base import Chooser, IntegerStream, nothing_to_draw

NEW_SOURCES = ("baseline", "zero")

_FOREVER = 2**62

#: A source in line: its clock half a sample ahead, what breaks ties, its key, clock units per token
#: (None where the weight moves), and tokens consumed. The least is next.
_Turn = tuple[float, int, str, "float | None", int]


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
        self._ties = IntegerStream(self.seed)
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
            key: self._counts[key] / (self.weights[key].evaluate(0) or 1.0)
            for key in self.keys
            if key in (counts or {})
        }
        self._line: list[_Turn] = []
        self._welcome_new_sources()
        self._line_up({})

    @property
    def counts(self) -> dict[str, int]:
        self._take_stock()
        return self._counts

    def choose(self, batch_index: int = 0) -> str:
        if batch_index != self._batch_index:
            self._batch_index = batch_index
            self._update_who_sits_out()
        try:
            return self._line[0][2]
        except IndexError:
            raise ConfigError(nothing_to_draw(self, batch_index)) from None

    def consume(self, key: str, tokens: int) -> None:
        # This runs for every row of a run, hence one tuple that holds it all, and no calls.
        ahead, _, first, rate, consumed = self._line[0]
        if first != key:
            raise ConfigError(f"consume({key!r}): only what choose() returned can be consumed.")
        if rate is None:
            ahead = self._advance(key, tokens)
        else:
            ahead += tokens * rate
        for tie in self._ties.left:  # noqa: B007, the first one
            break
        else:
            tie = self._ties.next()
        heapreplace(self._line, (ahead, tie, key, rate, consumed + tokens))

    def drop(self, key: str) -> None:
        super().drop(key)
        self._line_up(self._turns())

    def revive(self, keys: Iterable[str] | None = None) -> None:
        turns = self._turns()
        back = sorted(self._dropped if keys is None else self._dropped.intersection(keys))
        baseline = self._furthest_behind()
        super().revive(back)
        for key in back:
            self._clocks[key] = max(self._clocks[key], baseline)
        self._line_up(turns)

    def save_state(self) -> dict[str, Any]:
        turns = self._turns()
        return {
            **super().save_state(),
            "ties_drawn": self._ties.position,
            "turns": turns,
            "clocks": dict(self._clocks),
            "at_rest": sorted(self._at_rest),
            "batch_index": self._batch_index,
        }

    def restore_state(self, state: Mapping[str, Any]) -> None:
        super().restore_state(state)
        self._line = []
        self._clocks = {key: state["clocks"][key] for key in self.keys if key in state["clocks"]}
        self._at_rest = set(state["at_rest"]) & set(self.keys)
        self._batch_index = state["batch_index"]
        self._ties.position = state["ties_drawn"]
        self._welcome_new_sources()
        self._line_up(state["turns"])

    def _welcome_new_sources(self) -> None:
        baseline = self._furthest_behind() if self.new_source == "baseline" else 0.0
        for key in self.keys:
            if key not in self._clocks:
                self._clocks[key] = baseline
                self._counts[key] = round(baseline * self.weights[key].evaluate(self._batch_index))
        self._update_who_sits_out(line_up=False)

    def _update_who_sits_out(self, line_up: bool = True) -> None:
        """Let sources rest whose weight became 0, and come back those that have one again."""
        at_rest = {
            key for key in self._may_sit_out if self.weights[key].evaluate(self._batch_index) == 0
        }
        if at_rest == self._at_rest:
            return
        turns = self._turns()
        baseline = self._furthest_behind()
        for key in self._at_rest - at_rest:
            self._clocks[key] = max(self._clocks[key], baseline)
        self._at_rest = at_rest
        if line_up:
            self._line_up(turns)

    def _furthest_behind(self) -> float:
        self._take_stock()
        active = self._clocks.keys() - self._at_rest - self._dropped
        return min((self._clocks[key] for key in active), default=0.0)

    def _advance(self, key: str, tokens: int) -> float:
        """Move the clock of a source whose weight moves; where the source now stands in line."""
        rate = 1.0 / self.weights[key].evaluate(self._batch_index)
        self._clocks[key] += tokens * rate
        return self._clocks[key] + self._half_sample * rate

    def _take_stock(self) -> None:
        """Write down what the line knows: all counts, and the clocks that run at one rate."""
        for ahead, _, key, rate, consumed in self._line:
            self._counts[key] = consumed
            if rate is not None:
                self._clocks[key] = ahead - self._half_sample * rate

    def _turns(self) -> dict[str, list[Any]]:
        """What each source in line is compared by, as it was when the source was last read."""
        self._take_stock()
        return {key: [ahead, tie, rate] for ahead, tie, key, rate, _ in self._line}

    def _line_up(self, turns: Mapping[str, Sequence[Any]]) -> None:
        """Line up the active sources; those without a turn, or with another weight, get one."""
        self._line = []
        for key in self.keys:
            if key in self._dropped or key in self._at_rest:
                continue
            rate = self._constant_rates.get(key)
            ahead, tie, rate_before = turns.get(key) or (None, self._ties.next(), None)
            if ahead is None or rate != rate_before:
                rate_now = rate or 1.0 / self.weights[key].evaluate(self._batch_index)
                ahead = self._clocks[key] + self._half_sample * rate_now
            self._line.append((ahead, tie, key, rate, self._counts[key]))
        heapify(self._line)
