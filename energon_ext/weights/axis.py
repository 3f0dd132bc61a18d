# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Breakpoints: what they count, and how people write them."""

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Iterable, Mapping, Sequence

from energon_ext.arguments import check_integer
from energon_ext.errors import ConfigError

STEPS = "steps"
UNITS = (STEPS, "tokens", "samples", "batches")
MOST_BREAKPOINT = 10**36

#: How integers may be written, for messages.
EXAMPLES = "1000, 1_000, 10k, 2.5M, 40B, 1T or 1e9"

_COUNT = re.compile(r"([+-]?\d+(?:_\d+)*(?:\.\d+)?(?:[eE]\+?\d{1,3})?)([kMBT]?)", re.ASCII)
_SUFFIXES = {"": 1, "k": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_MOST_CHARACTERS = 64


@dataclass(frozen=True)
class ScheduleAxis:
    """The x-axis of every schedule of a run.

    Attributes:
        unit: ``steps`` (global batches), ``tokens`` (positions of all rows drawn before, padding
            included), ``samples`` (rows or samples drawn before, of all ranks) or ``batches`` (of
            one rank, which is what Energon's own schedules count). The field ``schedule_axis`` of
            the metadataset gives it; a launch script may give the same, or None for that one.
        end: optimizer steps after which the run ends; breakpoints behind it are reported as never
            reached. None where nobody can tell.

    Raises:
        ConfigError: an unknown unit, an end below 0.

    Example:
        >>> ScheduleAxis("batches", end=10_000).one
        'batch'
    """

    unit: str | None = None
    end: int | None = None

    def __post_init__(self) -> None:
        if self.unit not in (None, *UNITS):
            raise ConfigError(f"ScheduleAxis.unit: {self.unit!r} found, {', '.join(UNITS)} known.")
        if self.end is not None:
            check_integer("ScheduleAxis.end", self.end, 0)

    @property
    def one(self) -> str:
        """One unit, for messages."""
        return {"batches": "batch"}.get(self.counted, self.counted[:-1])

    def change_from(self, unit: str) -> str:
        """A line for a resume where breakpoints counted another unit; else empty."""
        if unit == self.counted:
            return ""
        return f"schedule_axis: breakpoints counted {unit}, and count {self.counted} from here on."

    @property
    def counted(self) -> str:
        """The unit, steps where none is given."""
        return self.unit or STEPS


def as_pairs(points: Any, where: str) -> list[tuple[Any, Any]]:
    """Breakpoints with their values, of a mapping or a list of pairs."""
    if isinstance(points, Mapping):
        return list(points.items())
    if isinstance(points, Iterable) and not isinstance(points, (str, bytes)):
        pairs = list(points)
        if all(isinstance(pair, Sequence) and len(pair) == 2 for pair in pairs):
            return [tuple(pair) for pair in pairs]
    allowed = "{breakpoint: value} or [[breakpoint, value]]"
    raise ConfigError(f"{where}: {points!r} found, {allowed} is allowed.")


def checked_breakpoint(breakpoint: Any, where: str) -> int:
    """A breakpoint as an integer; text is what Energon's YAML loader makes of mapping keys."""
    count = count_from(breakpoint)
    if count is None or not 0 <= count <= MOST_BREAKPOINT:
        allowed = f"an integer from 0 to {MOST_BREAKPOINT:.0e}, as {EXAMPLES}"
        raise ConfigError(f"{where}: breakpoint {breakpoint!r:.80} is not {allowed}.")
    return count


def count_from(value: Any) -> int | None:
    """The integer that a value gives, which may be a text as ``40B``; None where it gives none."""
    if isinstance(value, str):
        text = value.strip()
        match = _COUNT.fullmatch(text) if len(text) <= _MOST_CHARACTERS else None
        if match is None:
            return None
        number, suffix = match.groups()
        count = Fraction(number.replace("_", "")) * _SUFFIXES[suffix]
        return int(count) if count.denominator == 1 else None
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    return int(value) if isinstance(value, float) and value.is_integer() else None
