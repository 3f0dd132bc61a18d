# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""One weight: a constant, or values at knots with a rule for what lies between them.

Outside its knots a schedule keeps its first and last value.

=========== =================================================== ======
kind        between (x0, y0) and (x1, y1), t = (x-x0) / (x1-x0) values
=========== =================================================== ======
step        y0                                                  >= 0
linear      y0 + t (y1 - y0)                                    >= 0
cosine      y0 + (y1 - y0) (1 - cos(pi t)) / 2                  >= 0
exponential y0 (y1 / y0)^t                                      > 0
=========== =================================================== ======
"""

from __future__ import annotations

import bisect
import math
from abc import ABC, abstractmethod
from typing import Any, Iterable, Mapping, Sequence

import numpy as np

from energon_ext.errors import ConfigError

KINDS = ("step", "linear", "cosine", "exponential")


class WeightSpec(ABC):
    """A weight that may depend on the batch index. Immutable, picklable, never negative."""

    #: Whether the user wrote a schedule for this weight. A constant whose share moves because a
    #: sibling is scheduled is still a constant.
    is_scheduled: bool = False

    @abstractmethod
    def evaluate(self, batch_index: int) -> float:
        """The weight at one batch index."""

    @abstractmethod
    def evaluate_many(self, batch_indices: np.ndarray) -> np.ndarray:
        """The weight at each of ``batch_indices`` (int64 [n]), float64 [n]."""

    @abstractmethod
    def bounds(self, first: int, last: int) -> tuple[float, float]:
        """A lower and an upper bound of the weight on the indices ``first..last``, inclusive."""

    def knots(self) -> tuple[int, ...]:
        """Every index at which the rule changes."""
        return ()

    def describe(self) -> str:
        """One short phrase for error messages and plans."""
        return repr(self)


class ConstantWeight(WeightSpec):
    """A weight that never changes.

    Example:
        >>> ConstantWeight(5).evaluate(1_000_000)
        5.0
    """

    def __init__(self, value: float):
        self.value = _checked_value(value, "weight")

    def evaluate(self, batch_index: int) -> float:
        return self.value

    def evaluate_many(self, batch_indices: np.ndarray) -> np.ndarray:
        return np.full(len(batch_indices), self.value)

    def bounds(self, first: int, last: int) -> tuple[float, float]:
        return self.value, self.value

    def __repr__(self) -> str:
        return f"{self.value:g}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ConstantWeight) and other.value == self.value

    def __hash__(self) -> int:
        return hash(self.value)


class ScheduledWeight(WeightSpec):
    """A weight given by its values at knots; see the module for what lies between them.

    Args:
        kind: ``step``, ``linear``, ``cosine`` or ``exponential``.
        knots: batch indices, increasing, >= 0.
        values: the weight at each knot.

    Example:
        >>> weight = ScheduledWeight.from_points("step", {0: 100, 100: 10, 1000: 0})
        >>> [weight.evaluate(i) for i in (0, 99, 100, 999, 1000, 5000)]
        [100.0, 100.0, 10.0, 10.0, 0.0, 0.0]
        >>> ScheduledWeight.from_points("linear", {0: 100, 100: 0}).evaluate(50)
        50.0
    """

    is_scheduled = True

    def __init__(self, kind: str, knots: Sequence[int], values: Sequence[float]):
        if kind not in KINDS:
            raise ConfigError(f"weight: unknown kind {kind!r}; known: {', '.join(KINDS)}.")
        self.kind = kind
        self._knots = tuple(knots)
        self._values = tuple(values)

    @classmethod
    def from_points(
        cls,
        kind: str,
        points: Mapping[Any, float] | Iterable[Sequence[Any]],
        where: str = "weight",
    ) -> "ScheduledWeight":
        """A schedule from ``{knot: value}`` or ``[[knot, value], ...]``, in any order.

        Args:
            where: what an error names as the place.

        Raises:
            ConfigError: unknown kind, no points, a knot that is not an integer >= 0 or stands
                twice, a value that is not finite and >= 0 (> 0 for ``exponential``).
        """
        if kind not in KINDS:
            raise ConfigError(f"{where}: unknown kind {kind!r}; known: {', '.join(KINDS)}.")
        pairs: dict[int, float] = {}
        for knot, value in _as_pairs(points, f"{where}.{kind}"):
            index = _checked_knot(knot, f"{where}.{kind}")
            if index in pairs:
                raise ConfigError(f"{where}.{kind}: knot {index} stands twice; keep one.")
            pairs[index] = _checked_value(value, f"{where}.{kind}[{index}]")
            if kind == "exponential" and pairs[index] == 0:
                raise ConfigError(
                    f"{where}.{kind}[{index}]: 0 cannot be reached by a ratio; use a value > 0, "
                    f"or `linear`, or a later `step` to 0."
                )
        if not pairs:
            raise ConfigError(f"{where}.{kind}: no knots; give at least one, such as {{0: 1}}.")
        knots = sorted(pairs)
        return cls(kind, knots, [pairs[knot] for knot in knots])

    def evaluate(self, batch_index: int) -> float:
        position = bisect.bisect_right(self._knots, batch_index) - 1
        if position < 0:
            return self._values[0]
        left = self._values[position]
        if position == len(self._knots) - 1 or self.kind == "step":
            return left
        right = self._values[position + 1]
        start = self._knots[position]
        progress = (batch_index - start) / (self._knots[position + 1] - start)
        if self.kind == "linear":
            return left + progress * (right - left)
        if self.kind == "cosine":
            return left + 0.5 * (1.0 - math.cos(math.pi * progress)) * (right - left)
        return left * (right / left) ** progress

    def evaluate_many(self, batch_indices: np.ndarray) -> np.ndarray:
        indices = np.asarray(batch_indices, dtype=np.int64)
        knots = np.asarray(self._knots, dtype=np.int64)
        values = np.asarray(self._values, dtype=np.float64)
        position = np.searchsorted(knots, indices, side="right") - 1
        left_at = np.clip(position, 0, len(knots) - 1)
        if self.kind == "step":
            return values[left_at]
        right_at = np.minimum(left_at + 1, len(knots) - 1)
        span = np.maximum(knots[right_at] - knots[left_at], 1)
        progress = np.clip((indices - knots[left_at]) / span, 0.0, None)
        progress[left_at == right_at] = 0.0
        left, right = values[left_at], values[right_at]
        if self.kind == "linear":
            return left + progress * (right - left)
        if self.kind == "cosine":
            return left + 0.5 * (1.0 - np.cos(np.pi * progress)) * (right - left)
        return left * (right / left) ** progress

    def bounds(self, first: int, last: int) -> tuple[float, float]:
        # Every kind is monotone between knots.
        inside = slice(
            bisect.bisect_right(self._knots, first), bisect.bisect_right(self._knots, last)
        )
        values = (self.evaluate(first), *self._values[inside], self.evaluate(last))
        return min(values), max(values)

    def knots(self) -> tuple[int, ...]:
        return self._knots

    def __repr__(self) -> str:
        points = ", ".join(f"{k}: {v:g}" for k, v in zip(self._knots, self._values))
        return f"{self.kind}{{{points}}}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ScheduledWeight) and repr(other) == repr(self)

    def __hash__(self) -> int:
        return hash((self.kind, self._knots, self._values))


def weight_from_config(value: Any, where: str = "weight") -> WeightSpec:
    """The spec that a YAML value describes.

    Args:
        value: a number, or one of ``{step: ...}``, ``{linear: ...}``, ``{cosine: ...}``,
            ``{exponential: ...}`` with ``{knot: value}`` or ``[[knot, value], ...]``.
        where: the place in the YAML, for errors.

    Raises:
        ConfigError: says where, what was found and what is allowed.

    Example:
        >>> weight_from_config({"linear": {"0": 1, "3000": 100}}).evaluate(1500)
        50.5
        >>> weight_from_config(-1)
        Traceback (most recent call last):
        energon_ext.errors.ConfigError: weight: -1 is not a finite number >= 0.
    """
    if not isinstance(value, Mapping):
        return ConstantWeight(_checked_value(value, where))
    if len(value) != 1:
        raise ConfigError(
            f"{where}: {list(value)} found, exactly one of {', '.join(KINDS)} is allowed."
        )
    ((kind, points),) = value.items()
    return ScheduledWeight.from_points(kind, points, where)


def _as_pairs(points: Any, where: str) -> list[tuple[Any, Any]]:
    if isinstance(points, Mapping):
        return list(points.items())
    if isinstance(points, Iterable) and not isinstance(points, (str, bytes)):
        pairs = list(points)
        if all(isinstance(pair, Sequence) and len(pair) == 2 for pair in pairs):
            return [tuple(pair) for pair in pairs]
    raise ConfigError(
        f"{where}: {points!r} found, {{knot: value, ...}} or [[knot, value], ...] is allowed."
    )


def _checked_knot(knot: Any, where: str) -> int:
    # Energon's YAML loader hands mapping keys over as strings.
    if isinstance(knot, str) and knot.strip().lstrip("+-").isdigit():
        knot = int(knot)
    if isinstance(knot, bool) or not isinstance(knot, int) or knot < 0:
        raise ConfigError(f"{where}: knot {knot!r} is not an integer >= 0.")
    return knot


def _checked_value(value: Any, where: str) -> float:
    is_number = isinstance(value, (int, float, np.integer, np.floating))
    if isinstance(value, bool) or not is_number or not math.isfinite(value) or value < 0:
        raise ConfigError(f"{where}: {value!r} is not a finite number >= 0.")
    return float(value)
