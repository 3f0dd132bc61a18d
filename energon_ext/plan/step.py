# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The rows of a step: the mixture says whose, the sources say which.

A plan touches lengths only. Its n-th row depends on the configuration and on n, and not on the rank
or worker that asks, so all of them have the same.
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
    """Rows that were drawn together."""

    def __init__(self) -> None:
        self._parts: list[tuple[np.ndarray, Taken, int]] = []
        self._order: np.ndarray | None = None

    def put(self, where: np.ndarray, taken: Taken, source: int) -> None:
        """Place rows of a source, int64 [rows taken]; ``source`` is its number."""
        self._parts.append((where, taken, source))

    @property
    def num_rows(self) -> int:
        """Rows that were placed."""
        return sum(len(where) for where, _, _ in self._parts)

    def balance(self, cost: Cost, topology: Topology) -> None:
        """Deal the rows by cost."""
        self._order = balanced(self.costs(cost, topology.rows_per_step), topology)

    def costs(self, cost: Cost, rows: int) -> np.ndarray:
        """Of the rows in their natural order, float64 [rows]; 0 where no row was left."""
        costs = np.zeros(rows)
        for where, taken, _ in self._parts:
            lengths, ends = taken.pieces()
            of_lengths = np.diff(np.cumsum(cost(lengths))[ends - 1], prepend=0.0)
            costs[where] = of_lengths + taken.further_costs()
        return costs

    def taken(self, number: int) -> tuple[Taken, int, int] | None:
        """The rows that one was taken with, its place among them, and the number of their source.

        None where no row was left.
        """
        return self._places.get(number if self._order is None else int(self._order[number]))

    @functools.cached_property
    def _places(self) -> dict[int, tuple[Taken, int, int]]:
        return {
            place: (taken, own, source)
            for where, taken, source in self._parts
            for own, place in enumerate(where.tolist())
        }


@dataclass(frozen=True, eq=False)
class Advance:
    """The state of a plan after a step.

    Attributes:
        step, row: steps and rows drawn so far.
        next_rows: of the window of each source, int64 [sources].
        row_lengths: of rows that had other lengths than now.
        documents, tokens: drawn of each source so far, int64 [sources].
        credits: of every interleave.
        windows: those that are new, by the number of their source.
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
    """Draws rows of many sources.

    Args:
        sources: in the order of their keys.
        mixture: over the same sources.

    Attributes:
        step, row: steps and rows drawn so far.
        documents, tokens: drawn of each source so far, int64 [sources]; documents that ended.
        just_ended: keys of the sources that ended with the last step.
    """

    def __init__(self, sources: Sequence[RowSource], mixture: Mixture):
        self.sources, self.mixture = list(sources), mixture
        self._finite = [(number, rows) for number, rows in enumerate(sources) if rows.is_finite]
        self.step = self.row = 0
        self.row_lengths: RowLengths = ()
        self.documents = np.zeros(len(self.sources), np.int64)
        self.tokens = np.zeros(len(self.sources), np.int64)
        self.just_ended: list[str] = []
        self.begin_here()

    def begin_here(self) -> None:
        """Take all sources as they stand; the next advance has all windows."""
        self._next_rows = np.array([rows.next_row for rows in self.sources], np.int64)
        self._changed = {number: rows.window for number, rows in enumerate(self.sources)}
        self._note_ended()

    def _note_ended(self) -> None:
        """Let the mixture leave out the sources that have no row left."""
        for number, rows in self._finite:
            self.mixture.ended[number] = rows.ended

    def next(self, count: int, position: int) -> Step | None:
        """Draw a step of ``count`` rows; None where no source has a row left.

        Args:
            position: on the schedule axis.

        Raises:
            ConfigError: sources have rows left, and all of these have a weight of 0.
        """
        step = Step()
        missing = np.arange(count)
        before = self.mixture.ended.copy()
        attempt = 0
        while len(missing) and self.mixture.open(position):
            missing = self._draw(step, missing, attempt)
            attempt += 1
        if len(missing) == count and not self.mixture.ended.all():
            left = [k for k, ended in zip(self.mixture.keys, self.mixture.ended) if not ended]
            raise ConfigError(
                f"Every weight is 0 at position {position} of the schedules "
                f"among the sources that have rows left: {', '.join(left)}. Give one of them a "
                f"weight > 0 there, or raise a max_epochs."
            )
        if len(missing) == count:
            return None
        self.step += 1
        self.row += count
        self._note_ended()
        new = np.flatnonzero(self.mixture.ended & ~before)
        self.just_ended = [self.mixture.keys[number] for number in new.tolist()]
        return step

    def _draw(self, step: Step, missing: np.ndarray, attempt: int) -> np.ndarray:
        """Draw for some places of a step; those for which the drawn source had no row left."""
        drawn = self.mixture.draw(self.row + missing, attempt)
        by_source = np.argsort(drawn, kind="stable")
        numbers, begins = np.unique(drawn[by_source], return_index=True)
        tokens = np.zeros(len(self.sources), np.int64)
        left_over = []
        bounds = [*begins.tolist(), len(drawn)]
        for number, begin, end in zip(numbers.tolist(), bounds, bounds[1:]):
            own, rows = by_source[begin:end], self.sources[number]
            window = rows.window
            taken = rows.take(len(own))
            self._next_rows[number] = rows.next_row
            if rows.window is not window:
                self._changed[number] = rows.window
            found = len(taken)
            if found:
                step.put(missing[own[:found]], taken, number)
                tokens[number] = taken.num_tokens
                self.documents[number] += taken.num_documents
            if found < len(own):
                self.mixture.ended[number] = True
                left_over.append(own[found:])
        self.mixture.settle(tokens)
        self.tokens += tokens
        return missing[np.sort(np.concatenate(left_over))] if left_over else missing[:0]

    def advance(self) -> Advance:
        """The state now, with the windows that changed since the last call."""
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

    def to_json(self, now: Advance, names: Sequence[Sequence[str]]) -> dict[str, Any]:
        """A whole advance as JSON values, by the keys of sources and the names of interleaves.

        Args:
            names: by which each source is found when its key has changed.
        """
        drawn = zip(now.next_rows.tolist(), now.documents.tolist(), now.tokens.tolist())
        sources = {
            key: {
                "rows": rows.state_at(now.windows[number], next_row),
                "documents": documents,
                "tokens": tokens,
                "names": list(names[number]),
                "packing": None,
            }
            for number, (key, rows, (next_row, documents, tokens)) in enumerate(
                zip(self.mixture.keys, self.sources, drawn)
            )
        }
        return {
            "step": now.step,
            "row": now.row,
            "mixture": self.mixture.credits_to_json(now.credits),
            "sources": sources,
        }
