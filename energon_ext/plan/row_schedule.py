# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Rows whose length changes during a run.

All steps, and all batches, have the same number of positions: rows that are half as long are twice
as many. So nothing but the rows changes for what trains on the batches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from energon_ext.arguments import check_integer
from energon_ext.errors import ConfigError
from energon_ext.weights import ScheduledWeight

_EXAMPLE = "{step: {0: 1024, 10k: 4096}}"


@dataclass(frozen=True, eq=False)
class RowSchedule:
    """The positions of a row at each position of the schedule axis.

    Attributes:
        points: ``(breakpoint, positions of a row from there on)``, in order. The first applies
            before its breakpoint, too.
        where: the metadataset that has it.

    Example:
        >>> schedule = row_schedule_from_config({"step": {0: 1024, 500: 4096}}, "mix.yaml")
        >>> [schedule.at(position) for position in (0, 499, 500)]
        [1024, 1024, 4096]
        >>> schedule.longest
        4096
    """

    points: tuple[tuple[int, int], ...]
    where: str = ""

    def at(self, position: int) -> int:
        """Return the positions of a row that is drawn at a position of the axis."""
        passed = [length for point, length in self.points if point <= position]
        return passed[-1] if passed else self.points[0][1]

    @property
    def lengths(self) -> list[int]:
        """All lengths of rows, the shortest first."""
        return sorted({length for _, length in self.points})

    @property
    def longest(self) -> int:
        return self.lengths[-1]

    @property
    def breakpoints(self) -> tuple[int, ...]:
        return tuple(point for point, _ in self.points)

    def unreached(self, end: int) -> list[int]:
        """Return the breakpoints that a run up to a position does not reach."""
        return [point for point in self.breakpoints if point >= end]

    def to_json(self) -> list[list[int]]:
        return [list(point) for point in self.points]


def row_schedule_from_config(value: Any, where: str) -> RowSchedule:
    """Return the lengths of rows that a YAML value describes.

    Raises:
        ConfigError: it is not a ``step`` schedule, or its lengths are not powers of two of one
            another.

    Example:
        >>> row_schedule_from_config({"step": {0: 1024, 500: 1536}}, "mix.yaml")
        Traceback (most recent call last):
        energon_ext.errors.ConfigError: mix.yaml: row_tokens: rows of 1,024 and of 1,536 positions \
found; the longest must be 2, 4, 8, ... times as long as each other one.
    """
    place = f"{where}: row_tokens"
    if not isinstance(value, Mapping) or set(value) != {"step"}:
        raise ConfigError(
            f"{place}: {value!r:.80} found; rows have one length from a breakpoint on, such as "
            f"{_EXAMPLE}. A length that never changes is the seq_len of the TaskEncoder."
        )
    weight = ScheduledWeight("step", value["step"], place)
    points = []
    for point in weight.breakpoints():
        length = weight.evaluate(point)
        found = int(length) if length.is_integer() else length
        check_integer(f"{place}.step[{point}]", found, 2)
        points.append((point, int(length)))
    longest = max(length for _, length in points)
    for _, length in points:
        times, left = divmod(longest, length)
        if left or times & (times - 1):
            raise ConfigError(
                f"{place}: rows of {length:,} and of {longest:,} positions found; the longest must "
                f"be 2, 4, 8, ... times as long as each other one."
            )
    return RowSchedule(tuple(points), where)


def describe_points(points: Sequence[Sequence[int]], unit: str) -> str:
    """Return the lengths of rows as part of a sentence.

    Args:
        points: of :meth:`RowSchedule.to_json`.
        unit: what breakpoints count, in the singular.

    Example:
        >>> describe_points([[0, 1024], [5000, 4096]], "step")
        '1,024 positions, 4,096 from step 5,000 on'
    """
    (_, first), *others = points
    later = [f"{length:,} from {unit} {point:,} on" for point, length in others]
    return ", ".join([f"{first:,} positions", *later])


def describe_row_change(
    saved: Sequence[Sequence[int]] | None, now: RowSchedule | None, unit: str
) -> str:
    """Return a log line if a resume changes the schedule of the lengths of rows, else nothing.

    Args:
        saved: in the state; None if it has none.
    """
    found = None if now is None else now.to_json()
    if found == (None if saved is None else [list(each) for each in saved]):
        return ""
    names = ["none" if each is None else describe_points(each, unit) for each in (saved, found)]
    return f"row_tokens: was {names[0]}; from here on {names[1]}."
