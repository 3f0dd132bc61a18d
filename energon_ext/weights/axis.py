# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""What the knots of a schedule count: batches, optimizer steps or tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from energon_ext.errors import ConfigError
from energon_ext.weights.schedule import WeightSpec


@dataclass(frozen=True)
class ScheduleAxis:
    """The x-axis of every schedule of a run, given by the launch script.

    Batches have a fixed shape, so a position is exact and needs no communication:
    ``position = batch_index * units // batches``.

    Attributes:
        unit: what an error or a plan calls it.
        units: positions that ``batches`` per-rank batches are worth.
        batches: per-rank batches.
        lookahead_batches: evaluate so many batches ahead of the one being assembled; makes up for
            samples that wait in a packing buffer behind the choice.
        end: position at which the run ends; knots after it are reported as never reached.

    Example:
        >>> ScheduleAxis.steps(batches_per_step=4).position(11)
        2
        >>> ScheduleAxis.tokens(tokens_per_batch=8192).position(3)
        24576
    """

    unit: str = "batches"
    units: int = 1
    batches: int = 1
    lookahead_batches: int = 0
    end: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("units", 1), ("batches", 1), ("lookahead_batches", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"ScheduleAxis.{name}: {value!r} found, an integer >= {least}.")

    @classmethod
    def steps(cls, batches_per_step: int, **options) -> "ScheduleAxis":
        """Knots count optimizer steps of ``batches_per_step`` micro-batches of each rank."""
        return cls("optimizer steps", 1, batches_per_step, **options)

    @classmethod
    def tokens(cls, tokens_per_batch: int, **options) -> "ScheduleAxis":
        """Knots count tokens; a batch index stands for ``tokens_per_batch`` over all ranks."""
        return cls("tokens", tokens_per_batch, 1, **options)

    def position(self, batch_index: int) -> int:
        """The position on the axis of a per-rank batch index."""
        return (batch_index + self.lookahead_batches) * self.units // self.batches

    def first_batch_at(self, position: int) -> int:
        """The first per-rank batch index that has reached a position."""
        return max(0, -(-position * self.batches // self.units) - self.lookahead_batches)

    def restate(self, weight: WeightSpec) -> WeightSpec:
        """The same weight as a function of the per-rank batch index."""
        counts_batches = (self.units, self.batches, self.lookahead_batches) == (1, 1, 0)
        return weight if counts_batches or not weight.knots() else AxisWeight(weight, self)


class AxisWeight(WeightSpec):
    """A weight whose knots count something else than batches."""

    def __init__(self, weight: WeightSpec, axis: ScheduleAxis):
        self.weight = weight
        self.axis = axis
        self.is_scheduled = weight.is_scheduled

    def evaluate(self, batch_index: int) -> float:
        return self.weight.evaluate(self.axis.position(batch_index))

    def evaluate_many(self, batch_indices: np.ndarray) -> np.ndarray:
        return self.weight.evaluate_many(self.axis.position(np.asarray(batch_indices)))

    def bounds(self, first: int, last: int) -> tuple[float, float]:
        return self.weight.bounds(self.axis.position(first), self.axis.position(last))

    def knots(self) -> tuple[int, ...]:
        return tuple(sorted({self.axis.first_batch_at(knot) for knot in self.weight.knots()}))

    def describe(self) -> str:
        return self.weight.describe()

    def __repr__(self) -> str:
        return f"{self.weight!r} in {self.axis.unit}"
