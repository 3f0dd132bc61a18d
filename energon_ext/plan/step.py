# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The rows of one step, and the rank and place at which each is read."""

from __future__ import annotations

import functools

import numpy as np

from energon_ext.plan.cost import Cost
from energon_ext.plan.rows import TakenRows
from energon_ext.plan.topology import Topology, balance


class Step:
    """The rows of one step, which are drawn together.

    Attributes:
        position: position on the schedule axis at which they are drawn.
    """

    def __init__(self) -> None:
        self.position = 0
        self._parts: list[tuple[np.ndarray, TakenRows, int]] = []
        self._order: np.ndarray | None = None

    def put(self, places: np.ndarray, taken: TakenRows, source: int) -> None:
        """Add rows of a source, given by its number, at places in the step, int64 [rows taken]."""
        self._parts.append((places, taken, source))

    @property
    def num_rows(self) -> int:
        """Number of rows added."""
        return sum(len(places) for places, _, _ in self._parts)

    def balance(self, cost: Cost, topology: Topology) -> None:
        """Distribute the rows over ranks so that their costs are balanced."""
        self._order = balance(self.costs(cost, topology.places), topology)

    def costs(self, cost: Cost, rows: int) -> np.ndarray:
        """Return the costs of the rows in natural order, float64 [rows]; 0 for missing rows."""
        costs = np.zeros(rows)
        for places, taken, _ in self._parts:
            lengths, ends = taken.pieces()
            length_costs = np.diff(np.cumsum(cost(lengths))[ends - 1], prepend=0.0)
            costs[places] = length_costs + taken.further_costs()
        return costs

    def row(self, number: int) -> tuple[TakenRows, int, int] | None:
        """Return a row as (rows taken together, index in them, source number); None if missing."""
        return self._places.get(number if self._order is None else int(self._order[number]))

    def first(self) -> tuple[TakenRows, int, int]:
        """Return the row that was added first, in the same form."""
        _, taken, source = self._parts[0]
        return taken, 0, source

    @functools.cached_property
    def _places(self) -> dict[int, tuple[TakenRows, int, int]]:
        return {
            place: (taken, index, source)
            for places, taken, source in self._parts
            for index, place in enumerate(places.tolist())
        }
