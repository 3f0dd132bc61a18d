# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The position of a run on its schedule axis."""

from __future__ import annotations

from dataclasses import dataclass

from energon_ext.errors import ConfigError
from energon_ext.plan.topology import Topology
from energon_ext.weights import ScheduleAxis

#: Earlier lengths of rows as ``(stop, positions)``: the rows before ``stop``, from the previous
#: pair's ``stop`` on, had this number of positions.
RowLengths = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Clock:
    """Converts steps and rows to positions on the schedule axis.

    Attributes:
        axis: the unit of the breakpoints.
        topology: rows per step and per batch.
        row_tokens: positions per row; 0 if rows differ in length.
        skip: ranges ``[first, stop)`` of steps of the plan that no optimizer step reads.
    """

    axis: ScheduleAxis
    topology: Topology
    row_tokens: int = 0
    skip: tuple[tuple[int, int], ...] = ()

    def at(self, step: int, row: int, row_lengths: RowLengths = ()) -> int:
        """Return the position after ``step`` steps, or ``row`` rows, of the plan.

        Args:
            row_lengths: lengths of earlier rows, if they differ from the current one.

        Raises:
            ConfigError: the axis counts tokens, and rows have no fixed length.
        """
        if self.axis.unit == "tokens":
            if not self.row_tokens:
                raise ConfigError(
                    "schedule_axis: rows have no fixed length, so tokens cannot be counted; count "
                    "steps or samples, or set `tokens_per_sample` on the TaskEncoder."
                )
            return self._tokens_before(row, row_lengths)
        if self.axis.unit == "samples":
            return row
        return row // self.topology.rows_per_round if self.axis.unit == "batches" else step

    def _tokens_before(self, row: int, row_lengths: RowLengths) -> int:
        tokens, begin = row * self.row_tokens, 0
        for stop, length in row_lengths:
            tokens += max(0, min(row, stop) - begin) * (length - self.row_tokens)
            begin = stop
        return tokens

    def at_step(self, step: int, row: int | None = None, row_lengths: RowLengths = ()) -> int:
        """Return the position of an optimizer step, which counts no skipped steps.

        Args:
            row: its first row, not counting skipped ones; by default all steps have equal sizes.
        """
        skipped = 0
        for first, stop in self.skip:
            skipped += stop - first if step + skipped >= first else 0
        rows = self.topology.rows_per_step
        row = step * rows if row is None else row
        return self.at(step + skipped, row + skipped * rows, row_lengths)

    @property
    def end(self) -> int | None:
        """The position at which the run ends; None if its number of steps is unknown."""
        return None if self.axis.end is None else self.at_step(self.axis.end)

    def is_skipped(self, step: int) -> bool:
        """Return whether a step of the plan is skipped."""
        return any(first <= step < stop for first, stop in self.skip)
