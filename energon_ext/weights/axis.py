# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Breakpoints: their unit, and the ways to write them."""

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Iterable, Mapping, Sequence

from energon_ext.arguments import check_integer
from energon_ext.errors import ConfigError

STEPS = "steps"
UNITS = (STEPS, "tokens", "samples", "batches")
MAX_BREAKPOINT = 10**36

#: Accepted spellings of integers, for messages.
EXAMPLES = "1000, 1_000, 10k, 2.5M, 40B, 1T or 1e9"

_COUNT = re.compile(r"([+-]?\d+(?:_\d+)*(?:\.\d+)?(?:[eE]\+?\d{1,3})?)([kMBT]?)", re.ASCII)
_SUFFIXES = {"": 1, "k": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_MAX_CHARACTERS = 64


@dataclass(frozen=True)
class ScheduleAxis:
    """The x-axis of every schedule of a run.

    Attributes:
        unit: ``steps`` (global batches), ``tokens`` (positions of all rows drawn before, padding
            included), ``samples`` (rows or samples drawn before, on all ranks) or ``batches`` (of
            one rank, as in Energon's own schedules). Set by the field ``schedule_axis`` of the
            metadataset; a launch script may give the same unit, or None to use that field.
        end: optimizer steps after which the run ends; breakpoints from there on are reported as
            never reached. None if unknown.

    Raises:
        ConfigError: ``unit`` is unknown, or ``end`` < 0.

    Example:
        >>> ScheduleAxis("batches", end=10_000).one
        'batch'
    """

    unit: str | None = None
    end: int | None = None

    def __post_init__(self) -> None:
        if self.unit not in (None, *UNITS):
            needed = f"one of {', '.join(UNITS)} is needed"
            raise ConfigError(f"ScheduleAxis.unit: {self.unit!r} found, {needed}.")
        if self.end is not None:
            check_integer("ScheduleAxis.end", self.end, 0)

    @property
    def one(self) -> str:
        """The unit in the singular, for messages."""
        return {"batches": "batch"}.get(self.counted, self.counted[:-1])

    def change_from(self, unit: str) -> str:
        """Return a log line if the saved run counted another unit, else an empty string."""
        if unit == self.counted:
            return ""
        return f"schedule_axis: breakpoints counted {unit}; from here on they count {self.counted}."

    @property
    def counted(self) -> str:
        """The unit; steps by default."""
        return self.unit or STEPS


def as_pairs(points: Any, where: str) -> list[tuple[Any, Any]]:
    """Return ``(breakpoint, value)`` pairs from a mapping or a list of pairs."""
    if isinstance(points, Mapping):
        return list(points.items())
    if isinstance(points, Iterable) and not isinstance(points, (str, bytes)):
        pairs = list(points)
        if all(isinstance(pair, Sequence) and len(pair) == 2 for pair in pairs):
            return [tuple(pair) for pair in pairs]
    needed = "{breakpoint: value} or [[breakpoint, value]] is needed"
    raise ConfigError(f"{where}: {points!r:.80} found, {needed}.")


def parse_breakpoint(breakpoint: Any, where: str) -> int:
    """Return a breakpoint as an integer; Energon's YAML loader turns mapping keys into text."""
    count = count_from(breakpoint)
    if count is None or not 0 <= count <= MAX_BREAKPOINT:
        allowed = f"an integer from 0 to {MAX_BREAKPOINT:.0e}, such as {EXAMPLES}"
        raise ConfigError(f"{where}: breakpoint {breakpoint!r:.80} is not {allowed}.")
    return count


def count_from(value: Any) -> int | None:
    """Return a number, or a text such as ``40B``, as an integer; None if it is not one."""
    if isinstance(value, str):
        text = value.strip()
        match = _COUNT.fullmatch(text) if len(text) <= _MAX_CHARACTERS else None
        if match is None:
            return None
        number, suffix = match.groups()
        count = Fraction(number.replace("_", "")) * _SUFFIXES[suffix]
        return int(count) if count.denominator == 1 else None
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    return int(value) if isinstance(value, float) and value.is_integer() else None
