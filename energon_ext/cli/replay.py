# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Plans the steps of a saved run again, each with the metadataset with which it was planned.

The newest state says which data digest each span of steps had. A span is planned from the saved
state at its beginning, or else from where the span before it has led.
"""

import itertools
from pathlib import Path
from typing import Any, Callable, Iterator, Mapping, NamedTuple, Sequence

from energon_ext.cli.saved import SavedCursor
from energon_ext.errors import ConfigError, EnergonExtError
from energon_ext.plan.cursor import fork_at, save_cursor_of_plan
from energon_ext.plan.run import Run
from energon_ext.plan.step import Step
from energon_ext.progress import passing_bar

#: Opens a metadataset with the settings of a saved run; None if the run has no state.
Open = Callable[[Path, SavedCursor | None], Run]


class StepRange(NamedTuple):
    """Steps ``[start, stop)`` that were planned with one metadataset.

    Attributes:
        digest: their data digest; None for steps after the newest state.
        settings: a state of the run that planned them; None if there is none.
    """

    start: int
    stop: int
    digest: str | None
    settings: SavedCursor | None

    def __str__(self) -> str:
        last = self.stop - 1
        return f"Step {last}" if self.start == last else f"Steps {self.start} to {last}"


class PlannedStep(NamedTuple):
    """A step, and the dataset that planned it."""

    number: int
    step: Step
    blend: Run


class Replay:
    """Plans the steps of a run again.

    Args:
        cursors: the saved states of the run, oldest first; may be empty.
        metadatasets: those with which the run was planned, in any order.
    """

    def __init__(self, cursors: Sequence[SavedCursor], metadatasets: Sequence[Path], open_: Open):
        self._metadatasets, self._open = metadatasets, open_
        self._opened: dict[tuple[Path, SavedCursor | None], Run] = {}
        self._newest = cursors[-1] if cursors else None
        self._history = [] if self._newest is None else _spans_of(self._newest.state)
        # States of a branch that the run has left are no part of its history.
        self._saved = {
            cursor.step: cursor
            for cursor in cursors
            if _spans_of(cursor.state) == _cut(self._history, cursor.step)
        }

    def saved_before(self, step: int) -> SavedCursor | None:
        """Return the newest state at or before the beginning of a step."""
        return self._saved.get(max((each for each in self._saved if each <= step), default=-1))

    def spans(self, first: int, last: int) -> Iterator[StepRange]:
        """Yield the spans from the newest state before step ``first`` to step ``last``."""
        saved = self.saved_before(first)
        start = 0 if saved is None else saved.step
        bounds = {*self._saved, *(stop for stop, _ in self._history), last + 1}
        for stop in sorted(bound for bound in bounds if start < bound <= last + 1):
            digest = next((d for end, d in self._history if start < end), None)
            later = [each for each in sorted(self._saved) if each >= stop]
            yield StepRange(start, stop, digest, self._saved[later[0]] if later else self._newest)
            start = stop

    def steps(
        self, first: int, last: int, report: Callable[[StepRange, EnergonExtError], None]
    ) -> Iterator[PlannedStep]:
        """Yield the steps from the newest state before step ``first`` to step ``last``.

        Args:
            report: called with each span that cannot be planned, and the reason; its steps are
                left out.
        """
        state: Mapping[str, Any] | None = None
        for span in self.spans(first, last):
            saved = self._saved.get(span.start)
            if saved is not None:
                state = saved.state
            try:
                blend = self._dataset_of(span, state)
            except EnergonExtError as error:
                report(span, error)
                state = None
                continue
            yield from _plan(blend, span)
            is_needed = span.stop <= last and span.stop not in self._saved
            state = save_cursor_of_plan(blend) if is_needed else None

    def _dataset_of(self, span: StepRange, state: Mapping[str, Any] | None) -> Run:
        """Return a dataset at the first step of a span."""
        if state is None and span.start:
            raise ConfigError(
                "there is no state at their beginning, and the steps before are unknown."
            )
        for path in self._metadatasets:
            dataset = self._dataset(path, span)
            if dataset.data_digest == (span.digest or self._last_digest):
                _check_live_weights(dataset, span)
                return _fork(dataset, state)
        if span.digest is None:  # the run may have been resumed with any metadataset
            return _fork(self._dataset(self._metadatasets[0], span), state)
        raise ConfigError(
            "the run planned them with another metadataset, or from other data, than given here; "
            "add the metadataset with which they were planned, as it was then."
        )

    def doubt(self, step: int, blend: Run) -> str | None:
        """Return why a dataset may not have planned a step of the run, or None."""
        digest = self._last_digest
        if self._newest is None or step < self._newest.step or digest == blend.data_digest:
            return None
        return (
            f"Step {step} is after the newest state, of step {self._newest.step}, which was "
            f"planned with another metadataset. These rows are right only if the run has continued "
            f"with {self._metadatasets[0]}."
        )

    @property
    def _last_digest(self) -> str | None:
        return self._history[-1][1] if self._history else None

    def _dataset(self, path: Path, span: StepRange) -> Run:
        key = path, span.settings
        if key not in self._opened:
            self._opened[key] = self._open(path, span.settings)
        return self._opened[key]


def _fork(run: Run, state: Mapping[str, Any] | None) -> Run:
    return run.fork() if state is None else fork_at(run, state)


def _check_live_weights(dataset: Run, span: StepRange) -> None:
    """Raise StateMismatchError if lines that a later state used are no longer in their files."""
    if span.settings is None or span.digest is None:
        return
    saved = span.settings.state
    for live in dataset.live_weights:
        if live.key in saved["weights"]:
            live.check_used(saved["weights"][live.key], span.settings.step + (saved["done"] > 0))


def _plan(blend: Run, span: StepRange) -> Iterator[PlannedStep]:
    """Yield the steps of a span; fewer if all sources end."""
    count = span.stop - span.start
    steps = itertools.islice(blend.draw_steps(), count)
    shown = passing_bar("planning", count, steps, unit="step")
    for number, step in enumerate(shown, span.start):
        yield PlannedStep(number, step, blend)


def _spans_of(state: Mapping[str, Any]) -> list[tuple[int, str]]:
    """Return the ends and digests of the spans of steps before a state."""
    step = state["plan"]["step"]
    return _cut([*map(tuple, state["data_digests"])], step)


def _cut(spans: Sequence[tuple[int, str]], step: int) -> list[tuple[int, str]]:
    """Return the spans before a step."""
    cut, start = [], 0
    for stop, digest in spans:
        if start < min(stop, step):
            cut.append((min(stop, step), digest))
        start = stop
    return cut
