# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The unit of breakpoints: steps, tokens, samples, or batches of a rank."""

from dataclasses import dataclass

from energon_ext.arguments import check_integer
from energon_ext.errors import ConfigError

STEPS = "steps"
UNITS = (STEPS, "tokens", "samples", "batches")


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
