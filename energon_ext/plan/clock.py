# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The position of a run on its schedule axis."""

from __future__ import annotations

from dataclasses import dataclass

from energon_ext.errors import ConfigError
from energon_ext.plan.row_schedule import RowSchedule
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
        row_tokens: positions per row, of the longest if they have a schedule; 0 if rows differ in
            length.
        skip: ranges ``[first, stop)`` of steps of the plan that no optimizer step reads.
        rows: lengths of rows by schedule; None if they are all ``row_tokens`` long. All steps have
            as many positions as one of the longest rows, which ``topology`` counts.
    """

    axis: ScheduleAxis
    topology: Topology
    row_tokens: int = 0
    skip: tuple[tuple[int, int], ...] = ()
    rows: RowSchedule | None = None

    def row_tokens_at(self, position: int) -> int:
        """Return the positions of a row that is drawn at a position of the axis."""
        return self.row_tokens if self.rows is None else self.rows.at(position)

    def topology_of(self, row_tokens: int) -> Topology:
        """Return the topology of a step whose rows have this number of positions."""
        return self.topology.divide_rows(self.row_tokens // row_tokens if self.rows else 1)

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


def add_rows(lengths: RowLengths, begin: int, stop: int, row_tokens: int, usual: int) -> RowLengths:
    """Return the lengths of earlier rows with those of the rows from ``begin`` to ``stop - 1``.

    Args:
        usual: positions of rows that no pair covers.

    Example:
        >>> lengths = add_rows((), 0, 8, row_tokens=16, usual=64)
        >>> lengths = add_rows(lengths, 8, 16, row_tokens=16, usual=64)
        >>> add_rows(lengths, 20, 22, row_tokens=32, usual=64)
        ((16, 16), (20, 64), (22, 32))
    """
    if row_tokens == usual:
        return lengths
    end, last = lengths[-1] if lengths else (0, row_tokens)
    if end < begin:
        lengths = (*lengths, (begin, usual))
    elif last == row_tokens:
        lengths = lengths[:-1]
    return (*lengths, (stop, row_tokens))
