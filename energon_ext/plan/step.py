# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The rows of a step: the mixture says whose, the sources say which.

A plan touches lengths only. What it makes of n rows depends on the configuration and on n, and not
on who asks, so every rank and worker has the same.
"""

from __future__ import annotations

import functools
from typing import Any, Mapping

import numpy as np
from megatron.energon.state import FlexState

from energon_ext.errors import ConfigError
from energon_ext.mixture.mixture import Mixture
from energon_ext.plan.cost import Cost
from energon_ext.plan.deal import Topology, balanced
from energon_ext.plan.row_source import Taken
from energon_ext.plan.source import Source
from energon_ext.state.match import match_sources


class Step:
    """Rows that were drawn together."""

    def __init__(self) -> None:
        self._parts: list[tuple[np.ndarray, Taken, str]] = []
        self._order: np.ndarray | None = None

    def put(self, where: np.ndarray, taken: Taken, source: str) -> None:
        """Place rows of a source, int64 [rows taken]."""
        self._parts.append((where, taken, source))

    def balance(self, cost: Cost, topology: Topology) -> None:
        """Deal the rows by cost."""
        self._order = balanced(self.costs(cost, topology.rows_per_step), topology)

    def costs(self, cost: Cost, rows: int) -> np.ndarray:
        """Of the rows in their natural order, float64 [rows]; 0 where no row was left."""
        costs = np.zeros(rows)
        for where, taken, _ in self._parts:
            lengths, ends = taken.pieces()
            costs[where] = np.diff(np.cumsum(cost(lengths))[ends - 1], prepend=0.0)
        return costs

    def row(self, number: int) -> Any:
        """A row, read; None where there was none left."""
        found = self.taken(number)
        return None if found is None else found[0].row(found[1])

    def taken(self, number: int) -> tuple[Taken, int, str] | None:
        """The rows that one was taken with, its place among them, and the key of their source."""
        return self._places.get(number if self._order is None else int(self._order[number]))

    @functools.cached_property
    def _places(self) -> dict[int, tuple[Taken, int, str]]:
        """Which of the rows taken of a source each row is."""
        return {
            place: (taken, own, source)
            for where, taken, source in self._parts
            for own, place in enumerate(where.tolist())
        }


class Plan:
    """Draws rows of many sources.

    Args:
        sources: by key, sorted.
        mixture: over the same keys.

    Attributes:
        sources, mixture: as given.
        step, row: steps and rows drawn so far.
        documents, tokens: drawn of each source so far, int64 [sources]; documents that ended.
        moved: key in the restored state -> key of now, of sources that moved.

    State: per source its own state and what was drawn from it, the credits of interleaves, and what
    is retained of sources that are away; grows with the buffers of the sources, not with what was
    consumed.
    """

    def __init__(self, sources: Mapping[str, Source], mixture: Mixture):
        self.mixture = mixture
        self.sources = dict(sources)
        self._rows = [source.rows for source in sources.values()]
        self._finite = [(number, rows) for number, rows in enumerate(self._rows) if rows.is_finite]
        self._retained: dict[str, Any] = {}
        self.moved: dict[str, str] = {}
        self.step = self.row = 0
        self.documents = np.zeros(len(sources), np.int64)
        self.tokens = np.zeros(len(sources), np.int64)

    def next(self, count: int, position: int) -> Step | None:
        """Draw a step of ``count`` rows; None where no source has a row left.

        Args:
            position: on the schedule axis.

        Raises:
            ConfigError: sources have rows left, and all of these have a weight of 0.
        """
        step = Step()
        missing = np.arange(count)
        for number, rows in self._finite:
            self.mixture.ended[number] = rows.ended
        attempt = 0
        while len(missing) and self.mixture.open(position):
            missing = self._draw(step, missing, attempt)
            attempt += 1
        if len(missing) == count and not self.mixture.ended.all():
            left = [k for k, ended in zip(self.mixture.keys, self.mixture.ended) if not ended]
            raise ConfigError(
                f"Every weight is 0 at position {position} of the schedules "
                f"among the sources that have rows left: {', '.join(left)}. Give one of them a "
                f"weight > 0 there, raise a max_epochs, or use fewer workers."
            )
        if len(missing) == count:
            return None
        self.step += 1
        self.row += count
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
            own = by_source[begin:end]
            taken = self._rows[number].take(len(own))
            found = len(taken)
            if found:
                step.put(missing[own[:found]], taken, self.mixture.keys[number])
                tokens[number] = taken.num_tokens
                self.documents[number] += taken.num_documents
            if found < len(own):
                self.mixture.ended[number] = True
                left_over.append(own[found:])
        self.mixture.settle(tokens)
        self.tokens += tokens
        return missing[np.sort(np.concatenate(left_over))] if left_over else missing[:0]

    def save_state(self) -> FlexState:
        counts = zip(self.documents.tolist(), self.tokens.tolist())
        sources = {
            key: FlexState(
                rows=source.rows.save_state(),
                documents=documents,
                tokens=tokens,
                names=list(source.names),
            )
            for (key, source), (documents, tokens) in zip(self.sources.items(), counts)
        }
        return FlexState(
            step=self.step,
            row=self.row,
            mixture=self.mixture.save_state(),
            sources=FlexState({**self._retained, **sources}),
        )

    def restore_state(self, state: Mapping[str, Any], position: int) -> None:
        """Continue from :meth:`save_state`, perhaps of other sources.

        Args:
            position: on the schedule axis, where the run stands.
        """
        states = dict(state["sources"])
        matched = match_sources(states, {key: s.names for key, s in self.sources.items()})
        self.moved = {old: key for key, old in matched.items() if old != key}
        self.step, self.row = state["step"], state["row"]
        for number, (key, source) in enumerate(self.sources.items()):
            if key in matched:
                own = states.pop(matched[key])
                source.rows.restore_state(own["rows"])
                self.documents[number], self.tokens[number] = own["documents"], own["tokens"]
            elif source.streamed is not None:
                source.streamed.dataset.reset_state_deep()
        self._retained = states
        for number, rows in self._finite:
            self.mixture.ended[number] = rows.ended
        self.mixture.restore_state(state["mixture"], self.moved, position)
