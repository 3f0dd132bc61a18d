# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""How far a run has come: the state after the last batch that was handed out.

A plan draws a whole step at once, and may be some steps ahead of the batches. Every drawn step
therefore brings the state of the plan behind it, and a :class:`Progress` takes it over once the
last row of the step is out.
"""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass
from typing import Any, Iterator, NamedTuple

from energon_ext.plan.step import Advance

#: The number of a source and the description of one of its rows; None for a row of padding.
DescribedRow = tuple[int, Any] | None


@dataclass(frozen=True, eq=False)
class DrawnStep:
    """A step, as one rank reads it; ``number`` is that of the plan.

    Attributes:
        rounds: the rows of each batch of this rank; empty where the step is skipped.
        after: the state of the plan behind the step.
        ended: keys of the sources that the step has read to their end.
    """

    number: int
    rounds: list[list[DescribedRow]]
    after: Advance
    ended: tuple[str, ...] = ()


class Round(NamedTuple):
    """One batch of every rank: the rows of this one, the steps that were skipped right before it,
    and the step that it completes, if any."""

    rows: list[DescribedRow]
    skipped: tuple[DrawnStep, ...]
    completes: DrawnStep | None


def rounds_of(steps: Iterator[DrawnStep], first: int) -> Iterator[Round]:
    """The rounds of some steps, from one of the first step that is read on."""
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
        plan: the state of the plan, with all windows, at the start of the step that is open.
        done: rows of that step that all ranks have handed out.
        read: rows that all ranks have handed out since the run began.
        skipped: ranges of the steps that were skipped.
    """

    plan: Advance
    done: int = 0
    read: int = 0
    skipped: tuple[tuple[int, int], ...] = ()

    def hand_out(self, round_: Round, rows: int) -> None:
        """Go on behind a round of ``rows`` rows over all ranks."""
        for step in round_.skipped:
            self._finish(step)
            first = step.number
            if self.skipped and self.skipped[-1][1] == step.number:
                first, _ = self.skipped[-1]
                self.skipped = self.skipped[:-1]
            self.skipped = (*self.skipped, (first, step.number + 1))
        self.done += rows
        self.read += rows
        if round_.completes is not None:
            self._finish(round_.completes)

    def _finish(self, step: DrawnStep) -> None:
        windows = {**self.plan.windows, **step.after.windows}
        self.plan, self.done = dataclasses.replace(step.after, windows=windows), 0

    def copy(self) -> "Progress":
        """The same position, which does not move on."""
        return copy.copy(self)
