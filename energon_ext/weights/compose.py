# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Many weights: what they mean together.

Weights of one blend node mean something relative to each other only: a :class:`WeightGroup` turns
them into shares, and the share of a nested source is the product of the shares along its path.
"""

from __future__ import annotations

import functools
import math
from typing import Any, Sequence

import numpy as np

from energon_ext.errors import ConfigError
from energon_ext.weights.schedule import ConstantWeight, ScheduledWeight, WeightSpec

#: How the members of a node take turns.
BLEND, INTERLEAVE = "blend", "interleave"


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

    def bounds(self, first: int, last: int) -> tuple[float, float]:
        pairs = zip(self.outer.bounds(first, last), self.inner.bounds(first, last))
        low, high = (outer * inner for outer, inner in pairs)
        return low, high

    def knots(self) -> tuple[int, ...]:
        return tuple(sorted({*self.outer.knots(), *self.inner.knots()}))

    def describe(self) -> str:
        parts = [part for part in (self.outer, self.inner) if part.is_scheduled]
        return " x ".join(part.describe() for part in parts or (self.outer, self.inner))

    def __repr__(self) -> str:
        return f"{self.outer!r} * {self.inner!r}"


class WeightGroup:
    """The weights of one node; gives each of them its share of the node.

    Args:
        members: the weights.
        rule: ``blend``, shares are probabilities, or ``interleave``, shares are kept exactly.
        new_source: for an interleave, where a source starts that a resumed state does not know.

    Example:
        >>> group = WeightGroup([ConstantWeight(1), ConstantWeight(3)])
        >>> [group.share(i).evaluate(0) for i in range(2)]
        [0.25, 0.75]
    """

    def __init__(
        self, members: Sequence[WeightSpec], rule: str = BLEND, new_source: str = "baseline"
    ):
        self.members = tuple(members)
        self.rule = rule
        self.new_source = new_source
        # Siblings ask for the same index one after the other.
        self._values_at = functools.lru_cache(maxsize=1)(self._evaluate)
        self._bounds_on = functools.lru_cache(maxsize=1)(self._bound)

    def share(self, index: int, where: str = "") -> WeightSpec:
        """Member ``index`` divided by the sum of all; ``where`` is its place for messages."""
        return ShareWeight(self, index, where)

    def share_at(self, index: int, batch_index: int) -> float:
        """The share of a member at a batch index; 0 where all weights are 0."""
        values, total = self._values_at(batch_index)
        return values[index] / total if total > 0 else 0.0

    def share_bounds(self, index: int, first: int, last: int) -> tuple[float, float]:
        """A share is least where its weight is least and those of its siblings are greatest."""
        bounds, total_low, total_high = self._bounds_on(first, last)
        low, high = bounds[index]
        least_total = low + (total_high - high)
        greatest_total = high + (total_low - low)
        return (
            low / least_total if low > 0 else 0.0,
            min(1.0, high / greatest_total) if high > 0 else 0.0,
        )

    def _evaluate(self, batch_index: int) -> tuple[list[float], float]:
        values = [member.evaluate(batch_index) for member in self.members]
        return values, math.fsum(values)

    def _bound(self, first: int, last: int) -> tuple[list[tuple[float, float]], float, float]:
        bounds = [member.bounds(first, last) for member in self.members]
        lows, highs = zip(*bounds)
        return bounds, math.fsum(lows), math.fsum(highs)

    def __reduce__(self):
        return WeightGroup, (self.members, self.rule, self.new_source)


class ShareWeight(WeightSpec):
    """One weight divided by the sum of its siblings, at each index; 0 where all are 0."""

    def __init__(self, group: WeightGroup, index: int, where: str = ""):
        self.group = group
        self.index = index
        self.where = where
        self.is_scheduled = group.members[index].is_scheduled

    def evaluate(self, batch_index: int) -> float:
        return self.group.share_at(self.index, batch_index)

    def evaluate_many(self, batch_indices: np.ndarray) -> np.ndarray:
        values = [member.evaluate_many(batch_indices) for member in self.group.members]
        total = np.sum(values, axis=0)
        return np.divide(
            values[self.index], total, out=np.zeros(len(batch_indices)), where=total > 0
        )

    def bounds(self, first: int, last: int) -> tuple[float, float]:
        return self.group.share_bounds(self.index, first, last)

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
            f"This metadataset has a schedule or an interleave ({self.spec.describe()}), which the "
            f"TaskEncoder does not know; put energon_ext.DynamicBlendMixin first among its base "
            f"classes, or use energon_ext.PackedTaskEncoder."
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
    if outer == ConstantWeight(1.0):
        return inner
    for factor, schedule in ((outer, inner), (inner, outer)):
        if isinstance(factor, ConstantWeight) and isinstance(schedule, ScheduledWeight):
            values = [value * factor.value for value in schedule._values]
            if schedule.kind != "exponential" or factor.value > 0:
                return ScheduledWeight(schedule.kind, schedule._knots, values)
    return ProductWeight(outer, inner)


def eval_weight(weight: Any, batch_index: int) -> float:
    """The value of a spec or a plain number at a batch index."""
    return as_weight(weight).evaluate(batch_index)


def factors(weight: WeightSpec) -> tuple[WeightSpec, ...]:
    """The factors of a weight, from the outermost node in."""
    if isinstance(weight, ProductWeight):
        return (*factors(weight.outer), *factors(weight.inner))
    return (weight,)


def product(weights: Sequence[WeightSpec]) -> WeightSpec:
    """The product of factors, from the outermost node in."""
    result: WeightSpec = ConstantWeight(1.0)
    for weight in weights:
        result = compose_weights(result, weight, allow_nested_schedules=True)
    return result


def is_interleaved(weight: WeightSpec) -> bool:
    """Whether an interleave stands on the path of a source."""
    shares = (factor for factor in factors(weight) if isinstance(factor, ShareWeight))
    return any(share.group.rule == INTERLEAVE for share in shares)


def without_common_total(weights: Sequence[WeightSpec]) -> list[WeightSpec]:
    """The same weights up to one common factor, cheaper to evaluate.

    All sources of one metadataset share its outermost blend, and whoever compares their weights
    does not need them divided by that blend's sum. Without it a constant beside a schedule is a
    constant again.

    Example:
        >>> group = WeightGroup([ConstantWeight(1), ConstantWeight(3)])
        >>> without_common_total([group.share(0), group.share(1)])
        [1, 3]
    """
    paths = [factors(weight) for weight in weights]
    outermost = [path[0] for path in paths]
    if not all(
        isinstance(share, ShareWeight) and share.group is outermost[0].group for share in outermost
    ):
        return list(weights)
    return [product((path[0].group.members[path[0].index], *path[1:])) for path in paths]
