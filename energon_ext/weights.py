# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Blend weights as pure functions of the batch index.

A weight is a :class:`WeightSpec`: a constant, or values at knots with a rule for what lies between
them. Outside its knots a schedule keeps its first and last value.

=========== =================================================== ======
kind        between (x0, y0) and (x1, y1), t = (x - x0) / (x1 - x0) values
=========== =================================================== ======
step        y0                                                  >= 0
linear      y0 + t (y1 - y0)                                    >= 0
cosine      y0 + (y1 - y0) (1 - cos(pi t)) / 2                  >= 0
exponential y0 (y1 / y0)^t                                      > 0
=========== =================================================== ======

Weights of one blend node mean something relative to each other only: a :class:`WeightGroup` turns
them into shares, and the share of a nested source is the product of the shares along its path.
"""

from __future__ import annotations

import bisect
import math
from abc import ABC, abstractmethod
from typing import Any, Iterable, Mapping, Sequence

import numpy as np

from energon_ext.errors import ConfigError

#: Stands for "never changes again" where a batch index is expected.
NEVER = 2**63 - 1

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
    def stable_until(self, batch_index: int) -> int:
        """The first index after ``batch_index`` at which the value may have changed."""

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

    def stable_until(self, batch_index: int) -> int:
        return NEVER

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

    def stable_until(self, batch_index: int) -> int:
        following = bisect.bisect_right(self._knots, batch_index)
        if following == len(self._knots):
            return NEVER
        moves = (
            self.kind != "step"
            and following > 0
            and self._values[following] != self._values[following - 1]
        )
        return batch_index + 1 if moves else self._knots[following]

    def knots(self) -> tuple[int, ...]:
        return self._knots

    def __repr__(self) -> str:
        points = ", ".join(f"{k}: {v:g}" for k, v in zip(self._knots, self._values))
        return f"{self.kind}{{{points}}}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ScheduledWeight) and repr(other) == repr(self)

    def __hash__(self) -> int:
        return hash((self.kind, self._knots, self._values))


class ProductWeight(WeightSpec):
    """The product of weights along a path of nested blends."""

    def __init__(self, outer: WeightSpec, inner: WeightSpec):
        self.outer = outer
        self.inner = inner
        self.is_scheduled = outer.is_scheduled or inner.is_scheduled

    def evaluate(self, batch_index: int) -> float:
        return self.outer.evaluate(batch_index) * self.inner.evaluate(batch_index)

    def evaluate_many(self, batch_indices: np.ndarray) -> np.ndarray:
        return self.outer.evaluate_many(batch_indices) * self.inner.evaluate_many(batch_indices)

    def stable_until(self, batch_index: int) -> int:
        return min(self.outer.stable_until(batch_index), self.inner.stable_until(batch_index))

    def knots(self) -> tuple[int, ...]:
        return tuple(sorted({*self.outer.knots(), *self.inner.knots()}))

    def describe(self) -> str:
        parts = [part for part in (self.outer, self.inner) if part.is_scheduled]
        return " x ".join(part.describe() for part in parts or (self.outer, self.inner))

    def __repr__(self) -> str:
        return f"{self.outer!r} * {self.inner!r}"


class WeightGroup:
    """The weights of one blend node; gives each of them its share of the node.

    Example:
        >>> group = WeightGroup([ConstantWeight(1), ConstantWeight(3)])
        >>> [group.share(i).evaluate(0) for i in range(2)]
        [0.25, 0.75]
    """

    def __init__(self, members: Sequence[WeightSpec]):
        self.members = tuple(members)
        self._window = (0, 0)
        self._values: list[float] = []
        self._total = 0.0

    def share(self, index: int, where: str = "") -> WeightSpec:
        """Member ``index`` divided by the sum of all; ``where`` is its place for messages."""
        return ShareWeight(self, index, where)

    def value_and_total(self, index: int, batch_index: int) -> tuple[float, float]:
        """Member ``index`` and the sum, evaluated once for all members while nothing changes."""
        first, end = self._window
        if not first <= batch_index < end:
            self._values = [member.evaluate(batch_index) for member in self.members]
            self._total = math.fsum(self._values)
            self._window = (batch_index, self._next_change(batch_index))
        return self._values[index], self._total

    def stable_until(self, batch_index: int) -> int:
        first, end = self._window
        return end if first <= batch_index < end else self._next_change(batch_index)

    def _next_change(self, batch_index: int) -> int:
        return min(member.stable_until(batch_index) for member in self.members)


class ShareWeight(WeightSpec):
    """One weight divided by the sum of its siblings, at each index; 0 where all are 0."""

    def __init__(self, group: WeightGroup, index: int, where: str = ""):
        self.group = group
        self.index = index
        self.where = where
        self.is_scheduled = group.members[index].is_scheduled

    def evaluate(self, batch_index: int) -> float:
        value, total = self.group.value_and_total(self.index, batch_index)
        return value / total if total > 0 else 0.0

    def evaluate_many(self, batch_indices: np.ndarray) -> np.ndarray:
        values = [member.evaluate_many(batch_indices) for member in self.group.members]
        total = np.sum(values, axis=0)
        return np.divide(
            values[self.index], total, out=np.zeros(len(batch_indices)), where=total > 0
        )

    def stable_until(self, batch_index: int) -> int:
        return self.group.stable_until(batch_index)

    def knots(self) -> tuple[int, ...]:
        return tuple(sorted({knot for member in self.group.members for knot in member.knots()}))

    def describe(self) -> str:
        return self.where or repr(self)

    def __repr__(self) -> str:
        return f"({self.group.members[self.index]!r} of {len(self.group.members)})"


class ScheduledFloat(float):
    """Carries a :class:`WeightSpec` through code that expects a float.

    Stock metadatasets multiply and divide the weights of what they wrap, which this class does on
    the spec. Whoever asks for the number itself does not know schedules: that raises, instead of
    freezing the run at the weight of batch 0.
    """

    spec: WeightSpec

    def __new__(cls, spec: WeightSpec) -> "ScheduledFloat":
        self = super().__new__(cls, spec.evaluate(0))
        self.spec = spec
        return self

    def __mul__(self, other: Any) -> "ScheduledFloat":
        return ScheduledFloat(ProductWeight(as_weight(other), self.spec))

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> "ScheduledFloat":
        return ScheduledFloat(ProductWeight(ConstantWeight(1.0 / float(other)), self.spec))

    def __float__(self) -> float:
        raise ConfigError(
            f"This blend has a scheduled weight ({self.spec.describe()}), but the TaskEncoder does "
            f"not know schedules; put energon_ext.DynamicBlendMixin first among its base classes, "
            f"or use energon_ext.PackedTaskEncoder."
        )

    def __reduce__(self):
        return ScheduledFloat, (self.spec,)


def as_weight(value: Any) -> WeightSpec:
    """The spec of whatever stands in ``LoadedDataset.weight``: None, a number, a carried spec."""
    if isinstance(value, WeightSpec):
        return value
    if isinstance(value, ScheduledFloat):
        return value.spec
    return ConstantWeight(1.0 if value is None else value)


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


def compose_weights(outer: Any, inner: Any, *, allow_nested_schedules: bool = False) -> WeightSpec:
    """The weight of a source inside a weighted blend: the product of the two.

    Args:
        outer, inner: specs or numbers.
        allow_nested_schedules: the product of two schedules is meant, not a mistake.

    Raises:
        ConfigError: both are scheduled and that was not allowed; names both places.

    Example:
        >>> weight = compose_weights(ScheduledWeight.from_points("linear", {0: 10, 5: 0}), 0.5)
        >>> weight.evaluate(0), weight.evaluate(5)
        (5.0, 0.0)
    """
    outer, inner = as_weight(outer), as_weight(inner)
    if outer.is_scheduled and inner.is_scheduled and not allow_nested_schedules:
        raise ConfigError(
            f"A schedule inside a schedule: {outer.describe()} and {inner.describe()}. Make one of "
            f"them a constant, or set `allow_nested_schedules: true` if the product is meant."
        )
    if isinstance(outer, ConstantWeight) and isinstance(inner, ConstantWeight):
        return ConstantWeight(outer.value * inner.value)
    for factor, schedule in ((outer, inner), (inner, outer)):
        if isinstance(factor, ConstantWeight) and isinstance(schedule, ScheduledWeight):
            values = [value * factor.value for value in schedule._values]
            if schedule.kind != "exponential" or factor.value > 0:
                return ScheduledWeight(schedule.kind, schedule._knots, values)
    return ProductWeight(outer, inner)


def eval_weight(weight: Any, batch_index: int) -> float:
    """The value of a spec or a plain number at a batch index."""
    return as_weight(weight).evaluate(batch_index)


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
