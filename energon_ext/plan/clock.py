# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The position of a run on its schedule axis."""

from __future__ import annotations

from dataclasses import dataclass

from energon_ext.errors import ConfigError
from energon_ext.plan.deal import Topology
from energon_ext.weights import ScheduleAxis

#: ``(row, positions)`` for each change of the length of rows: rows before that row, and from that
#: of the previous pair on, had this number of positions.
RowLengths = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Clock:
    """Positions on the schedule axis.

    Attributes:
        axis: what the breakpoints of the weights count.
        topology: rows of steps and batches.
        row_tokens: positions of a row; 0 where rows differ.
        skip: steps ``[first, stop)`` of the plan that no optimizer step reads.
    """

    axis: ScheduleAxis
    topology: Topology
    row_tokens: int = 0
    skip: tuple[tuple[int, int], ...] = ()

    def at(self, step: int, row: int, row_lengths: RowLengths = ()) -> int:
        """The position after some steps that had some rows in all.

        Args:
            row_lengths: of earlier rows.

        Raises:
            ConfigError: the axis counts tokens, and rows have no fixed length.
        """
        if self.axis.unit == "tokens":
            if not self.row_tokens:
                raise ConfigError(
                    "schedule_axis: tokens cannot be counted where rows have no fixed length; "
                    "count steps or samples, or set `tokens_per_sample` on the TaskEncoder."
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
        """At an optimizer step that begins with a row; by default all have as many rows as now."""
        skipped = 0
        for first, stop in self.skip:
            skipped += stop - first if step + skipped >= first else 0
        rows = self.topology.rows_per_step
        row = step * rows if row is None else row
        return self.at(step + skipped, row + skipped * rows, row_lengths)

    @property
    def end(self) -> int | None:
        """The position at which the run ends, where a launch script gives its steps."""
        return None if self.axis.end is None else self.at_step(self.axis.end)

    def is_skipped(self, step: int) -> bool:
        """True if a step of the plan is not read."""
        return any(first <= step < stop for first, stop in self.skip)
