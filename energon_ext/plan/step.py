# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Draw the rows of a step: the mixture chooses the source of each row, the source the row itself.

A plan uses lengths only. Its n-th row depends only on the configuration and on n, not on the rank
or worker, so all of them draw the same plan.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Mapping, Sequence

import numpy as np

from energon_ext.errors import ConfigError
from energon_ext.mixture.interleave import Credits
from energon_ext.mixture.mixture import Mixture
from energon_ext.plan.clock import RowLengths
from energon_ext.plan.cost import Cost
from energon_ext.plan.deal import Topology, balanced
from energon_ext.plan.row_source import RowSource, Taken, Window


class Step:
    """The rows of one step, which are drawn together."""

    def __init__(self) -> None:
        self._parts: list[tuple[np.ndarray, Taken, int]] = []
        self._order: np.ndarray | None = None

    def put(self, places: np.ndarray, taken: Taken, source: int) -> None:
        """Add rows of a source, given by its number, at places in the step, int64 [rows taken]."""
        self._parts.append((places, taken, source))

    @property
    def num_rows(self) -> int:
        """Number of rows added."""
        return sum(len(places) for places, _, _ in self._parts)

    def balance(self, cost: Cost, topology: Topology) -> None:
        """Distribute the rows over ranks so that their costs are balanced."""
        self._order = balanced(self.costs(cost, topology.rows_per_step), topology)

    def costs(self, cost: Cost, rows: int) -> np.ndarray:
        """Return the costs of the rows in natural order, float64 [rows]; 0 for missing rows."""
        costs = np.zeros(rows)
        for places, taken, _ in self._parts:
            lengths, ends = taken.pieces()
            length_costs = np.diff(np.cumsum(cost(lengths))[ends - 1], prepend=0.0)
            costs[places] = length_costs + taken.further_costs()
        return costs

    def taken(self, number: int) -> tuple[Taken, int, int] | None:
        """Return a row as (rows taken together, index in them, source number); None if missing."""
        return self._places.get(number if self._order is None else int(self._order[number]))

    def first(self) -> tuple[Taken, int, int]:
        """Return the row that was added first, in the same form."""
        _, taken, source = self._parts[0]
        return taken, 0, source

    @functools.cached_property
    def _places(self) -> dict[int, tuple[Taken, int, int]]:
        return {
            place: (taken, index, source)
            for places, taken, source in self._parts
            for index, place in enumerate(places.tolist())
        }


@dataclass(frozen=True, eq=False)
class Advance:
    """The state of a plan after a step.

    Attributes:
        step, row: steps and rows drawn so far.
        row_lengths: lengths of earlier rows, if they differ from the current one.
        next_rows: rows taken from the window of each source, int64 [sources].
        documents, tokens: finished documents and tokens drawn from each source, int64 [sources].
        credits: state of every interleave.
        windows: windows that changed since the previous advance, by the number of the source.
    """

    step: int
    row: int
    row_lengths: RowLengths
    next_rows: np.ndarray
    documents: np.ndarray
    tokens: np.ndarray
    credits: tuple[Credits, ...]
    windows: Mapping[int, Window]


class Plan:
    """Draws the rows of many sources, step by step.

    Args:
        sources: in the order of their keys.
        mixture: over the same sources.
        repeats: start another pass, in another order, whenever all sources have ended.

    Attributes:
        step, row: steps and rows drawn so far.
        row_lengths: lengths of earlier rows, if they differ from the current one.
        documents, tokens: finished documents and tokens drawn from each source, int64 [sources].
        just_ended: keys of the sources that ended with the last step.
    """

    def __init__(self, sources: Sequence[RowSource], mixture: Mixture, *, repeats: bool = False):
        self.sources, self.mixture, self.repeats = list(sources), mixture, repeats
        self._finite = [(number, rows) for number, rows in enumerate(sources) if rows.is_finite]
        self.step = self.row = 0
        self.row_lengths: RowLengths = ()
        self.documents = np.zeros(len(self.sources), np.int64)
        self.tokens = np.zeros(len(self.sources), np.int64)
        self.just_ended: list[str] = []
        self.begin_here()

    def begin_here(self) -> None:
        """Adopt the current state of all sources; the next advance contains all windows."""
        self._next_rows = np.array([rows.next_row for rows in self.sources], np.int64)
        self._changed = {number: rows.window for number, rows in enumerate(self.sources)}
        self._update_ended()

    @property
    def is_finite(self) -> bool:
        """True if there is a last row."""
        return not self.repeats and len(self._finite) == len(self.sources)

    @property
    def ended(self) -> bool:
        """True if no row is left."""
        return not self.repeats and bool(self.mixture.ended.all())

    def _begin_pass(self) -> None:
        """Let all sources start another pass."""
        for number, rows in self._finite:
            rows.begin_pass()
            self._changed[number] = rows.window
        self._update_ended()

    def _update_ended(self) -> None:
        """Exclude sources that have no row left from the mixture."""
        for number, rows in self._finite:
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
            left = [key for key, ended in zip(self.mixture.keys, self.mixture.ended) if not ended]
            if not left:
                return None
            raise ConfigError(
                f"Every weight is 0 at position {position} for the sources with rows left: "
                f"{', '.join(left)}. Give one of them a weight > 0 there, or raise a max_epochs."
            )
        self.step += 1
        self.row += count
        self._update_ended()
        new = np.flatnonzero(self.mixture.ended & ~before & (not self.repeats))
        self.just_ended = [self.mixture.keys[number] for number in new.tolist()]
        return step

    def _draw(self, step: Step, missing: np.ndarray, attempt: int) -> np.ndarray:
        """Draw rows for the missing places of a step; return the places still missing."""
        drawn = self.mixture.draw(self.row + missing, attempt)
        by_source = np.argsort(drawn, kind="stable")
        numbers, begins = np.unique(drawn[by_source], return_index=True)
        tokens = np.zeros(len(self.sources), np.int64)
        left_over = []
        bounds = [*begins.tolist(), len(drawn)]
        for number, begin, end in zip(numbers.tolist(), bounds, bounds[1:]):
            chosen, rows = by_source[begin:end], self.sources[number]
            window = rows.window
            taken = rows.take(len(chosen))
            self._next_rows[number] = rows.next_row
            if rows.window is not window:
                self._changed[number] = rows.window
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

    def advance(self) -> Advance:
        """Return the current state, with the windows that changed since the last call."""
        changed, self._changed = self._changed, {}
        return Advance(
            step=self.step,
            row=self.row,
            row_lengths=self.row_lengths,
            next_rows=self._next_rows.copy(),
            documents=self.documents.copy(),
            tokens=self.tokens.copy(),
            credits=self.mixture.credits(),
            windows=changed,
        )

    def to_json(self, advance: Advance, names: Sequence[Sequence[str]]) -> dict[str, Any]:
        """Return an advance as JSON values; it must contain the windows of all sources.

        Args:
            names: names by which each source is found if its key has changed.
        """
        sources = {
            key: {
                "rows": rows.state_at(advance.windows[number], int(advance.next_rows[number])),
                "documents": int(advance.documents[number]),
                "tokens": int(advance.tokens[number]),
                "names": list(names[number]),
                "packing": None,
            }
            for number, (key, rows) in enumerate(zip(self.mixture.keys, self.sources))
        }
        return {
            "step": advance.step,
            "row": advance.row,
            "mixture": self.mixture.credits_to_json(advance.credits),
            "sources": sources,
        }
