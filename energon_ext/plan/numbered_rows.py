# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The rows of a run by number, for loops that choose the numbers themselves.

Row n is the n-th row that the run reads, in the order of the plan. Padding and the rows of skipped
steps have no number.

A plan draws steps one after the other. To find a row it is drawn from the nearest earlier *mark*, a
state of the plan between two steps. Rows in order therefore cost no more than the plan itself.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from energon_ext.errors import ConfigError
from energon_ext.plan.cursor import restore_cursor, save_cursor
from energon_ext.plan.progress import DescribedRow, Progress
from energon_ext.plan.run import Run
from energon_ext.plan.topology import Topology
from energon_ext.state.match import SourceChange

#: Steps whose rows are kept, since a loop may ask for a row several times; and marks.
MAX_STEPS, MAX_MARKS = 16, 256


@dataclass(frozen=True, eq=False)
class _Step:
    """A step that is read.

    Attributes:
        rows: its rows without padding.
        places: the place of each of them in the step.
        begun, after: the progress after its first place, and after the step.
    """

    rows: list[DescribedRow]
    places: list[int]
    begun: Progress
    after: Progress


class NumberedRows:
    """Finds the rows of a run by number.

    Args:
        run: it is not moved.

    Attributes:
        run: the same run from its first row on, in natural order, divided into single rows.

    Raises:
        ConfigError: the run has live weights, layouts, rows of several lengths, or breakpoints that
            count batches.

    State: the cursor of the run after some rows, see :mod:`energon_ext.plan.cursor`. It may be
    saved after any row, and depends on nobody's batches, ranks or workers.
    """

    def __init__(self, run: Run):
        if run.live_weights:
            raise ConfigError(
                f"{run.live_weights[0].key}: live weights are decided while the run trains, but "
                f"any row may be asked for; remove `weights_file`, or use ExactDataLoader."
            )
        if run.options.contexts is not None:
            raise ConfigError(
                "contexts: the loop makes its own batches of rows, which have no layout; leave the "
                "option out, or use ExactDataLoader."
            )
        if run.clock.rows is not None:
            raise ConfigError(
                "row_tokens: a schedule found, but the loop decides how many rows a step has; give "
                "one length, or use ExactDataLoader."
            )
        if run.clock.axis.counted == "batches":
            raise ConfigError(
                "schedule_axis: batches found, but the loop makes its own batches; count steps or "
                "samples."
            )
        self.run = run.over(Topology(run.topology.rows_per_step))
        # Rows are not distributed over ranks here, so they need not be balanced.
        self.run.options = dataclasses.replace(self.run.options, cost=None)
        self._begin = self.run.progress
        self._set_marks(self._begin)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the steps that are being drawn, which cannot be sent to another process."""
        return {**vars(self), "_drawn": None, "_steps": OrderedDict()}

    def _set_marks(self, *marks: Progress) -> None:
        """Forget all steps; they are drawn from these marks."""
        self._marks = {mark.read: mark for mark in marks}
        self._given = frozenset(self._marks)
        #: Number of the first row that can be found.
        self.first = min(self._marks)
        self._stride = 1  # steps between two marks
        self._steps: OrderedDict[int, _Step] = OrderedDict()  # by the number of their first row
        self._drawn: Iterator[tuple[int, _Step]] | None = None
        self._next = 0  # first row of the step that is drawn next

    def count(self) -> int | None:
        """Return how many rows the run has, None if it is endless; this plans the rest of it."""
        if not self.run.plan.is_finite:
            return None
        newest = max(self._marks)
        run = self._run_at(self._marks[newest])
        steps = zip(itertools.count(run.plan.step), run.draw_steps())
        is_skipped = run.clock.is_skipped
        return newest + sum(step.num_rows for number, step in steps if not is_skipped(number))

    def __getitem__(self, number: int) -> DescribedRow:
        """Return a row; IndexError if the run has fewer, or began after it with another mix."""
        first, step = self._step_with(number)
        return step.rows[number - first]

    def cursor(self, number: int) -> dict[str, Any]:
        """Return the state of the run after the first ``number`` rows."""
        if number in self._marks:
            return save_cursor(self.run, self._marks[number])
        first, step = self._step_with(number - 1)
        if number - first == len(step.rows):
            return save_cursor(self.run, step.after)
        done = step.places[number - 1 - first] + 1
        return save_cursor(self.run, dataclasses.replace(step.begun, done=done, read=first + done))

    def restore(self, state: Mapping[str, Any]) -> tuple[int, list[SourceChange]]:
        """Continue from a cursor; return the number of rows before it, and what it changes.

        Raises: see :func:`~energon_ext.plan.cursor.restore_cursor`.
        """
        changes = restore_cursor(self.run, state)
        progress = self.run.progress
        done = progress.done
        mark = dataclasses.replace(progress, done=0, read=progress.read - done)
        # With the same mix since the first row, earlier rows can be planned again.
        self._set_marks(*([self._begin] if self._has_begun_alike(state) else []), mark)
        if not done:
            return mark.read, changes
        places = self._step_with(mark.read)[1].places
        return mark.read + sum(place < done for place in places), changes

    def _has_begun_alike(self, state: Mapping[str, Any]) -> bool:
        """Return whether this run has planned all rows before a state, as it plans them now."""
        stop = state["plan"]["step"]
        skip = [[first, min(end, stop)] for first, end in self.run.clock.skip if first < stop]
        digests = {digest for _, digest in state["data_digests"]}
        saved = [list(each) for each in state["skipped"]]
        return digests == {self.run.data_digest} and saved == skip

    def _step_with(self, number: int) -> tuple[int, _Step]:
        """Return the number of the first row of a step, and the step."""
        if number < self.first:
            raise IndexError(
                f"Row {number} was read before the mix changed; rows from {self.first} on are "
                f"planned with the present one. Read rows in order (shuffle=False)."
            )
        rows = self.run.topology.rows_per_step
        first = number - (number - self.first) % rows
        if first not in self._steps:
            self._draw_until(first)
        self._steps.move_to_end(first)
        step = self._steps[first]
        if number - first >= len(step.rows):
            raise IndexError(f"Row {number} does not exist; the run has {first + len(step.rows)}.")
        return first, step

    def _draw_until(self, first: int) -> None:
        """Draw the plan up to the step that begins with a row."""
        begin = max(number for number in self._marks if number <= first)
        drawn, self._drawn = self._drawn, None  # so that none is left after an error
        if drawn is None or not begin <= self._next <= first:
            drawn, self._next = self._draw(self._marks[begin]), begin
        for found, step in drawn:
            self._steps[found] = step
            if len(self._steps) > MAX_STEPS:
                self._steps.popitem(last=False)
            self._next = found + self.run.topology.rows_per_step
            if step.after.read == self._next:  # else it has padding, and is the last one
                self._mark(self._next, step.after)
            if found == first:
                self._drawn = drawn
                return
        raise IndexError(f"Row {first} does not exist; the run ends before it.")

    def _mark(self, number: int, after: Progress) -> None:
        """Keep a state between two steps, in a long run only some of them."""
        if self._is_at_stride(number):
            self._marks[number] = after
        if len(self._marks) > MAX_MARKS:
            self._stride *= 2
            kept = [n for n in self._marks if n in self._given or self._is_at_stride(n)]
            self._marks = {number: self._marks[number] for number in kept}

    def _is_at_stride(self, number: int) -> bool:
        return (number - self.first) // self.run.topology.rows_per_step % self._stride == 0

    def _run_at(self, mark: Progress) -> Run:
        """Return a run that draws from a mark on, the rows of an incomplete last step, too."""
        run = copy.copy(self.run)
        run.spec = dataclasses.replace(run.spec, pads=True)
        run.progress = mark.copy()
        run.rewind()
        return run

    def _draw(self, mark: Progress) -> Iterator[tuple[int, _Step]]:
        """Yield the steps from a mark on, each with the number of its first row."""
        run = self._run_at(mark)
        places: list[DescribedRow] = []
        begun = run.progress
        for round_ in run.rounds(run.draw_own_steps()):
            places += round_.batch.rows
            run.hand_out(round_)
            if len(places) == 1:
                begun = run.progress.copy()
            if round_.completes is not None:
                first = run.progress.read - len(places)
                yield first, _without_padding(first, places, begun, run.progress)
                places = []


def _without_padding(
    first: int, places: Sequence[DescribedRow], begun: Progress, after: Progress
) -> _Step:
    read = [place for place, (_, _, is_padding, _) in enumerate(places) if not is_padding]
    after = dataclasses.replace(after, read=first + len(read))
    return _Step([places[place] for place in read], read, begun, after)
