# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Draw the rows of steps: the mixture chooses the source of each row, the source the row itself.

A plan uses lengths only. Its n-th row depends only on the configuration and on n, not on the rank
or worker, so all of them draw the same plan.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, Mapping, Sequence

import numpy as np

from energon_ext.mixture.interleave import Credits
from energon_ext.mixture.mixture import Mixture
from energon_ext.plan.clock import RowLengths
from energon_ext.plan.rows import Rows, Window
from energon_ext.plan.step import Step


@dataclass(frozen=True, eq=False)
class PlanState:
    """The state of a plan between two steps.

    Attributes:
        step, row: steps and rows drawn so far.
        row_lengths: lengths of earlier rows, if they differ from the current one.
        row_tokens: positions of the rows in the windows; 0 if they differ.
        next_rows: rows taken from the window of each source, int64 [sources].
        documents, tokens: finished documents and tokens drawn from each source, int64 [sources].
        credits: state of every interleave.
        ended: sources that have no row left, bool [sources].
        windows: windows that changed since the previous state, by the number of the source.
    """

    step: int
    row: int
    row_lengths: RowLengths
    row_tokens: int
    next_rows: np.ndarray
    documents: np.ndarray
    tokens: np.ndarray
    credits: tuple[Credits, ...]
    ended: np.ndarray
    windows: Mapping[int, Window]


class Plan:
    """Draws the rows of many sources, step by step.

    Args:
        sources: their first rows, in the order of their keys. They never move: the plan takes rows
            from a copy, which it makes when it first draws from a source.
        mixture: over the same sources.
        repeats: start another pass, in another order, whenever all sources have ended.
        row_tokens: positions of a row; 0 if rows differ.

    Attributes:
        step, row: steps and rows drawn so far.
        row_lengths: lengths of earlier rows, if they differ from the usual one.
        row_tokens: positions of the next rows.
        documents, tokens: finished documents and tokens drawn from each source, int64 [sources].
        just_ended: keys of the sources that ended with the last step.
    """

    def __init__(
        self,
        sources: Sequence[Rows],
        mixture: Mixture,
        *,
        repeats: bool = False,
        row_tokens: int = 0,
    ):
        self._rows, self.mixture, self.repeats = list(sources), mixture, repeats
        self.row_tokens = row_tokens
        self._finite = [number for number, rows in enumerate(sources) if rows.is_finite]
        self.step = self.row = 0
        self.row_lengths: RowLengths = ()
        self.documents = np.zeros(len(sources), np.int64)
        self.tokens = np.zeros(len(sources), np.int64)
        self.just_ended: list[str] = []
        self._is_own = [False] * len(sources)  # else a source has not been copied yet
        self._windows = [rows.window for rows in sources]
        self._next_rows = np.array([rows.next_row for rows in sources], np.int64)
        self._changed = dict(enumerate(self._windows))
        for number in self._finite:
            mixture.ended[number] = sources[number].ended

    def rows(self, number: int) -> Rows:
        """Return the rows of a source at the current step of this plan."""
        if not self._is_own[number]:
            window, next_row = self._windows[number], int(self._next_rows[number])
            self._rows[number] = self._rows[number].at(window, next_row)
            self._is_own[number] = True
        return self._rows[number]

    def fork(self, state: PlanState) -> Plan:
        """Return a plan that draws on its own from a state, which has the windows of all sources.

        This plan may be ahead of the state, and draws on as if the fork did not exist.
        """
        other = copy.copy(self)
        other._rows, other._is_own = list(self._rows), [False] * len(self._rows)
        other.step, other.row, other.row_lengths = state.step, state.row, state.row_lengths
        other.row_tokens = state.row_tokens
        other.documents, other.tokens = state.documents.copy(), state.tokens.copy()
        other.just_ended = []
        other.mixture = self.mixture.fork(state.credits)
        other.mixture.ended[:] = state.ended
        if state.row_tokens != self.row_tokens:
            other._rows = [rows.with_length(state.row_tokens) for rows in self._rows]
            other.mixture.set_row_tokens(state.row_tokens)
        other._windows = [state.windows[number] for number in range(len(self._rows))]
        other._next_rows = state.next_rows.copy()
        other._changed = dict(state.windows)
        return other

    def repack(self, row_tokens: int) -> None:
        """Continue in rows with another number of positions, as a resume would."""
        for number in range(len(self._rows)):
            self.rows(number).repack(row_tokens)
        self.adopt_rows()
        self.mixture.set_row_tokens(row_tokens)
        self.row_tokens = row_tokens

    def adopt_rows(self) -> None:
        """Adopt the rows of all sources after they were restored or packed again."""
        for number, rows in enumerate(self._rows):
            if self._is_own[number]:
                self._note(number, rows)
        for number in self._finite:
            self.mixture.ended[number] = self._has_ended(number)

    def _note(self, number: int, rows: Rows) -> None:
        """Note where the rows of a source are now."""
        self._next_rows[number] = rows.next_row
        if rows.window is not self._windows[number]:
            self._windows[number] = self._changed[number] = rows.window

    @property
    def is_finite(self) -> bool:
        """True if there is a last row."""
        return not self.repeats and len(self._finite) == len(self._rows)

    @property
    def ended(self) -> bool:
        """True if no row is left."""
        return not self.repeats and bool(self.mixture.ended.all())

    def _begin_pass(self) -> None:
        """Let all sources start another pass."""
        for number in self._finite:
            rows = self.rows(number)
            rows.begin_pass()
            self._note(number, rows)
            self.mixture.ended[number] = rows.ended

    def next(self, count: int, position: int) -> Step | None:
        """Draw a step of ``count`` rows, or fewer at the end; None if no source has a row left.

        Args:
            position: current position on the schedule axis.

        Raises:
            ConfigError: all sources that have rows left have weight 0.
        """
        step = Step()
        missing = np.arange(count)
        before = self.mixture.ended.copy()
        attempt = 0
        while len(missing):
            if self.repeats and self.mixture.ended.all():
                self._begin_pass()
            if not self.mixture.open(position):
                break
            missing = self._draw(step, missing, attempt)
            attempt += 1  # draw again where a source had no row left
        if len(missing) == count:
            if self.mixture.ended.all():
                return None
            raise self.mixture.error_of_weights(position, "rows", "raise a max_epochs")
        self.step += 1
        self.row += count
        for number in self._finite:
            self.mixture.ended[number] = self._has_ended(number)
        new = np.flatnonzero(self.mixture.ended & ~before & (not self.repeats))
        self.just_ended = [self.mixture.keys[number] for number in new.tolist()]
        return step

    def _draw(self, step: Step, missing: np.ndarray, attempt: int) -> np.ndarray:
        """Draw rows for the missing places of a step; return the places still missing."""
        drawn = self.mixture.draw(self.row + missing, attempt)
        by_source = np.argsort(drawn, kind="stable")
        numbers, begins = np.unique(drawn[by_source], return_index=True)
        tokens = np.zeros(len(self._rows), np.int64)
        left_over = []
        bounds = [*begins.tolist(), len(drawn)]
        for number, begin, end in zip(numbers.tolist(), bounds, bounds[1:]):
            chosen, rows = by_source[begin:end], self.rows(number)
            taken = rows.take(len(chosen))
            self._note(number, rows)
            if len(taken):
                step.put(missing[chosen[: len(taken)]], taken, number)
                tokens[number] = taken.num_tokens
                self.documents[number] += taken.num_documents
            if len(taken) < len(chosen):
                self.mixture.ended[number] = True
                left_over.append(chosen[len(taken) :])
        self.mixture.settle(tokens)
        self.tokens += tokens
        return missing[np.sort(np.concatenate(left_over))] if left_over else missing[:0]

    def _has_ended(self, number: int) -> bool:
        """Return whether a source has no row left; one that was not drawn from is as it was."""
        is_own = self._is_own[number]
        return self._rows[number].ended if is_own else bool(self.mixture.ended[number])

    def save_state(self) -> PlanState:
        """Return the current state, with the windows that changed since the last call."""
        changed, self._changed = self._changed, {}
        return PlanState(
            step=self.step,
            row=self.row,
            row_lengths=self.row_lengths,
            row_tokens=self.row_tokens,
            next_rows=self._next_rows.copy(),
            documents=self.documents.copy(),
            tokens=self.tokens.copy(),
            credits=self.mixture.credits(),
            ended=self.mixture.ended.copy(),
            windows=changed,
        )

    def save_whole_state(self) -> PlanState:
        """Return the current state, with the windows of all sources."""
        self._changed = dict(enumerate(self._windows))
        return self.save_state()

    def to_json(self, state: PlanState, names: Sequence[Sequence[str]]) -> dict[str, Any]:
        """Return a state as JSON values; it must contain the windows of all sources.

        Args:
            names: names by which each source is found if its key has changed.
        """
        sources = {
            key: {
                "rows": rows.state_at(state.windows[number], int(state.next_rows[number])),
                "documents": int(state.documents[number]),
                "tokens": int(state.tokens[number]),
                "names": list(names[number]),
                "packing": None,
            }
            for number, (key, rows) in enumerate(zip(self.mixture.keys, self._rows))
        }
        return {
            "step": state.step,
            "row": state.row,
            "mixture": self.mixture.credits_to_json(state.credits),
            "sources": sources,
        }
