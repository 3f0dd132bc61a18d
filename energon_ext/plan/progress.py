# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The progress of a run: its state after the last batch that was handed out.

A plan draws a whole step at once and may be some steps ahead of the batches. Every drawn step
therefore comes with the state of the plan after it, which :class:`Progress` adopts once the last
row of the step has been handed out.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Iterator, NamedTuple

from energon_ext.plan.plan import PlanState
from energon_ext.plan.topology import Topology

#: A source number, the description of one of its rows, whether the row is to become padding, and
#: the weight of the source in the loss, None for 1.
DescribedRow = tuple[int, Any, bool, float | None]


class DescribedBatch(NamedTuple):
    """A batch of one rank before it is read.

    Attributes:
        rows: its rows; in a layout one for each source, which are joined.
        context_size: in a layout, the context-parallel ranks that share it; else None.
        row_tokens: positions of each row, if their length has a schedule; else None.
    """

    rows: list[DescribedRow]
    context_size: int | None = None
    row_tokens: int | None = None


@dataclass(frozen=True, eq=False)
class DrawnStep:
    """A step as one rank reads it.

    Attributes:
        number: number of the step in the plan.
        rounds: the batches of this rank; empty if the step is skipped.
        after: the state of the plan after the step.
        ended: keys of the sources that end with this step.
    """

    number: int
    rounds: list[DescribedBatch]
    after: PlanState
    ended: tuple[str, ...] = ()


class Round(NamedTuple):
    """One batch of every rank: that of this rank, the steps that are skipped right before the
    round, and the step that it completes, or None."""

    batch: DescribedBatch
    skipped: tuple[DrawnStep, ...]
    completes: DrawnStep | None


def rounds_of(steps: Iterator[DrawnStep], first: int) -> Iterator[Round]:
    """Yield the rounds of steps, beginning with round ``first`` of the first step that is read."""
    skipped: list[DrawnStep] = []
    for step in steps:
        if not step.rounds:
            skipped.append(step)
            continue
        last = len(step.rounds) - 1
        for number in range(first, last + 1):
            completes = step if number == last else None
            yield Round(step.rounds[number], tuple(skipped), completes)
            skipped = []
        first = 0


@dataclass(eq=False)
class Progress:
    """How much of a plan has been handed out.

    Attributes:
        plan: the state of the plan, with all windows, at the start of the current step.
        done: rows of that step handed out so far, on all ranks; in layouts, batches of each rank.
        read: rows handed out since the run began, on all ranks; in layouts, those of whole steps.
        skipped: ranges ``(first, stop)`` of skipped steps.
        batches: batches of this rank since the start or the restore; no state has it.
    """

    plan: PlanState
    done: int = 0
    read: int = 0
    skipped: tuple[tuple[int, int], ...] = ()
    batches: int = 0

    def hand_out(self, round_: Round, topology: Topology) -> None:
        """Advance by a round."""
        for step in round_.skipped:
            self._finish(step)
            first = step.number
            if self.skipped and self.skipped[-1][1] == first:  # extend the last range
                first, _ = self.skipped[-1]
                self.skipped = self.skipped[:-1]
            self.skipped = (*self.skipped, (first, step.number + 1))
        self.batches += 1
        if topology.in_layouts:
            self.done += 1
            self.read += topology.rows_per_step if round_.completes is not None else 0
        else:
            rows = min(topology.rows_per_round, topology.rows_per_step - self.done)
            self.done, self.read = self.done + rows, self.read + rows
        if round_.completes is not None:
            self._finish(round_.completes)

    def _finish(self, step: DrawnStep) -> None:
        windows = {**self.plan.windows, **step.after.windows}
        self.plan, self.done = dataclasses.replace(step.after, windows=windows), 0

    def copy(self) -> "Progress":
        """Return a copy that later rounds do not advance."""
        return dataclasses.replace(self)
