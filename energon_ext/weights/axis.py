# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""What the breakpoints of a schedule count: steps, tokens, or batches of a rank."""

from dataclasses import dataclass

from energon_ext.arguments import check_integer
from energon_ext.errors import ConfigError

UNITS = ("steps", "tokens", "batches")


@dataclass(frozen=True)
class ScheduleAxis:
    """The x-axis of every schedule of a run, given by the launch script.

    Attributes:
        unit: ``steps`` (global batches), ``tokens`` (positions of all rows drawn before, padding
            included) or ``batches`` (of one rank, which is what Energon's own schedules count).
        lookahead: weights are evaluated so many units ahead; makes up for samples that wait in a
            packing buffer behind the draw.
        end: position at which the run ends; breakpoints after it are reported as never reached.

    Raises:
        ConfigError: an unknown unit, a lookahead or an end below 0.

    Example:
        >>> ScheduleAxis("tokens").position(step=3, row=24, batch=6, row_tokens=1024)
        24576
        >>> ScheduleAxis(lookahead=2).position(step=3, row=24, batch=6)
        5
    """

    unit: str = "steps"
    lookahead: int = 0
    end: int | None = None

    def __post_init__(self) -> None:
        if self.unit not in UNITS:
            raise ConfigError(f"ScheduleAxis.unit: {self.unit!r} found, {', '.join(UNITS)} known.")
        check_integer("ScheduleAxis.lookahead", self.lookahead, 0)
        if self.end is not None:
            check_integer("ScheduleAxis.end", self.end, 0)

    @property
    def one(self) -> str:
        """One unit, for messages."""
        return {"steps": "step", "tokens": "token", "batches": "batch"}[self.unit]

    def position(self, step: int, row: int, batch: int, row_tokens: int = 0) -> int:
        """Where a step stands on the axis.

        Args:
            step: steps before it.
            row: rows before it, of all ranks.
            batch: batches of a rank before it.
            row_tokens: positions of a row; needed to count tokens.
        """
        if self.unit == "tokens" and not row_tokens:
            raise ConfigError(
                "ScheduleAxis: tokens cannot be counted where rows have no fixed length; count "
                "steps, or set `tokens_per_sample` on the TaskEncoder."
            )
        counted = {"steps": step, "tokens": row * row_tokens, "batches": batch}[self.unit]
        return counted + self.lookahead
