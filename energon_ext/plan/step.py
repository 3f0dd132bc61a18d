# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The rows of one step, and the rank and place at which each is read."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from energon_ext.errors import ConfigError
from energon_ext.plan.cost import Cost
from energon_ext.plan.layout import Units
from energon_ext.plan.rows import TakenRows
from energon_ext.plan.topology import Topology, balance


class UnitContents(NamedTuple):
    """Units of one source in a step.

    Attributes:
        source: its number.
        taken: rows of it that were taken together.
        places: row among them of each unit, and its number in the row.
        rows: the row of the step in which each unit was planned.
    """

    source: int
    taken: TakenRows
    places: list[tuple[int, int]]
    rows: list[int]


class Step:
    """The rows of one step, which are drawn together.

    Attributes:
        position: position on the schedule axis at which they are drawn.
        topology: distributes them over ranks and micro-batches.
        row_tokens: positions of each; 0 if rows differ in length.
    """

    def __init__(self) -> None:
        self.position, self.topology, self.row_tokens = 0, Topology(1), 0
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

    @functools.cached_property
    def units(self) -> Units:
        """The documents and pieces of documents in the step, row by row.

        Raises:
            ConfigError: rows have a cost beside their lengths, which a layout cannot divide.
        """
        if any(taken.further_costs().any() for _, taken, _ in self._parts):
            raise ConfigError(
                "context sizes: samples have a cost beside their tokens, such as images, which is "
                "not divided among context-parallel ranks; leave context sizes out."
            )
        lengths, rows = self._pieces[:2]
        return Units(lengths, np.arange(1, len(lengths) + 1), rows)

    def contents_of_units(self, numbers: Sequence[int]) -> Iterator[UnitContents]:
        """Yield some units, those of a source together."""
        _, rows, parts, places = self._pieces
        for part in sorted({int(parts[number]) for number in numbers}):
            own = [number for number in numbers if parts[number] == part]
            _, taken, source = self._parts[part]
            found = [(int(places[number, 0]), int(places[number, 1])) for number in own]
            yield UnitContents(source, taken, found, rows[own].tolist())

    @functools.cached_property
    def _pieces(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Of each piece in the step, row by row: its length, row and part, int64 [pieces], and its
        row in the part and number in that row, int64 [pieces, 2]."""
        lengths, rows, parts, places = [], [], [], []
        for part, (own_rows, taken, _) in enumerate(self._parts):
            found, ends = taken.pieces()
            counts = np.diff(ends, prepend=0)
            first = np.repeat(ends - counts, counts)
            lengths.append(found)
            rows.append(np.repeat(own_rows, counts))
            parts.append(np.full(len(found), part))
            index = np.repeat(np.arange(len(counts)), counts)
            places.append(np.stack([index, np.arange(len(found)) - first], axis=1))
        columns = [np.concatenate(each).astype(np.int64) for each in (lengths, rows, parts, places)]
        order = np.argsort(columns[1], kind="stable")
        found_lengths, found_rows, found_parts, found_places = (each[order] for each in columns)
        return found_lengths, found_rows, found_parts, found_places

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
