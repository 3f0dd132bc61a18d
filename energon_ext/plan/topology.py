# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Distribute the rows of a step over ranks and micro-batches."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from energon_ext.errors import ConfigError

#: Ranks swap rows until the heaviest is within this factor of the mean, at most this many times.
NEARLY_EQUAL, MAX_SWAPS = 1.005, 256


@dataclass(frozen=True)
class Topology:
    """The ranks, workers and micro-batches of a run.

    A step is read in rounds of one batch per rank: rank r reads the rows
    ``[r * batch_rows, (r + 1) * batch_rows)`` of a round. The workers of a rank take turns.

    In *layouts* (:mod:`energon_ext.plan.layout`) the documents of a step are put into micro-batches
    of their own, so a step may have any number of rows, and counts as one round.

    Attributes:
        rows_per_step: rows of a global batch, a multiple of the rows of a round.
        batch_rows: rows of one batch of one rank.
        ranks, rank: number of data-parallel ranks, and this one.
        workers: worker processes per rank; 1 if the rank reads without workers.
        in_layouts: whether steps are read in layouts.
        is_uneven: whether any number of rows per step is allowed; padding then fills the last round
            of every step.

    Example:
        >>> topology = Topology(rows_per_step=8, batch_rows=2, ranks=2, rank=1)
        >>> topology.rounds, [list(topology.rows_of(number)) for number in range(2)]
        (2, [[2, 3], [6, 7]])
    """

    rows_per_step: int
    batch_rows: int = 1
    ranks: int = 1
    rank: int = 0
    workers: int = 1
    in_layouts: bool = False
    is_uneven: bool = False

    def __post_init__(self) -> None:
        if self.rows_per_step < 1 or (self.places > self.rows_per_step and not self.is_uneven):
            raise ConfigError(
                f"rows_per_step: {self.rows_per_step} found; it must be a multiple of batch_size x "
                f"data-parallel ranks = {self.batch_rows} x {self.ranks}."
            )

    @classmethod
    def of(
        cls,
        worker_config: Any,
        batch_rows: int | None,
        rows_per_step: int | None,
        in_layouts: bool = False,
    ) -> "Topology":
        """Build the topology of Energon's worker configuration; by default a step is one round."""
        batch_rows = batch_rows or 1
        return cls(
            rows_per_step or batch_rows * worker_config.world_size,
            batch_rows,
            worker_config.world_size,
            worker_config.rank,
            max(1, worker_config.num_workers),
            in_layouts,
        )

    @property
    def rows_per_round(self) -> int:
        """Rows of one batch on every rank."""
        return self.rows_per_step if self.in_layouts else self.batch_rows * self.ranks

    @property
    def rounds(self) -> int:
        """Batches per rank in a step."""
        return -(-self.rows_per_step // self.rows_per_round)

    @property
    def places(self) -> int:
        """Rows in the rounds of a step, with those that padding fills."""
        return self.rounds * self.rows_per_round

    def divide_rows(self, parts: int) -> Topology:
        """Return the topology of rows that are ``parts`` times as short, and so as many."""
        if parts == 1:
            return self
        return replace(
            self, rows_per_step=parts * self.rows_per_step, batch_rows=parts * self.batch_rows
        )

    def rows_of(self, number: int) -> range:
        """Return the rows of this rank in a round of a step."""
        first = number * self.rows_per_round + self.rank * self.batch_rows
        return range(first, first + self.batch_rows)


def balance(costs: np.ndarray, topology: Topology) -> np.ndarray:
    """Order the rows of a step so that all ranks have about the same total cost.

    Rows are assigned from the most to the least expensive, each to the rank with the smallest total
    that is not full (longest processing time first, Graham 1969, with the same number of rows for
    every rank). Then the ranks with the largest and the smallest total swap rows. Each rank reads
    its most expensive rows first, so that the batches of a round cost about the same; a batch of
    several rows mixes expensive and cheap ones.

    Args:
        costs: float64 [rows per step], cost of each row.

    Returns:
        int64 [rows per step]: the row to put at each place, see :meth:`Topology.rows_of`.

    Example:
        >>> topology = Topology(rows_per_step=4, ranks=2)
        >>> balance(np.array([9.0, 1.0, 8.0, 4.0]), topology).tolist()  # 9 + 1 and 8 + 4
        [0, 2, 1, 3]
    """
    ranks, rounds, batch_rows = topology.ranks, topology.rounds, topology.batch_rows
    rows_of: list[list[int]] = [[] for _ in range(ranks)]
    lightest = [(0.0, rank) for rank in range(ranks)]  # a heap
    ordered = np.argsort(-costs, kind="stable")
    for row, cost in zip(ordered.tolist(), costs[ordered].tolist()):
        total, rank = lightest[0]
        rows_of[rank].append(row)
        if len(rows_of[rank]) < rounds * batch_rows:
            heapq.heapreplace(lightest, (total + cost, rank))
        else:
            heapq.heappop(lightest)
    # Deal every second row of the batches in reverse, to pair expensive with cheap ones.
    even = _swap_rows(np.array(rows_of), costs).reshape(ranks, batch_rows, rounds)
    even[:, 1::2] = even[:, 1::2, ::-1]
    return even.transpose(2, 0, 1).reshape(-1)


def _swap_rows(rows: np.ndarray, costs: np.ndarray) -> np.ndarray:
    """Swap rows between ranks; return int64 [ranks, rows], each rank's most expensive row first."""
    totals = costs[rows].sum(1)
    enough = NEARLY_EQUAL * totals.mean()
    for _ in range(MAX_SWAPS):
        most, least = totals.argmax(), totals.argmin()
        gap = totals[most] - totals[least]
        gains = costs[rows[most]][:, None] - costs[rows[least]]
        heavy, light = np.unravel_index(np.abs(gains - gap / 2).argmin(), gains.shape)
        gain = gains[heavy, light]
        if totals[most] <= enough or not 0 < gain < gap:
            break
        rows[most, heavy], rows[least, light] = rows[least, light], rows[most, heavy]
        totals[most] -= gain
        totals[least] += gain
    return np.take_along_axis(rows, np.argsort(-costs[rows], axis=1, kind="stable"), axis=1)


def imbalance(steps: Iterable[np.ndarray], topology: Topology) -> dict[str, tuple[float, float]]:
    """Compute how much the largest cost exceeds the mean, as a ratio averaged over steps.

    Args:
        steps: costs of the rows of each step, float64 [rows per step]; a step of rows that are a
            quarter as long has four times as many.
        topology: distributes the rows.

    Returns:
        For ``natural`` and ``balanced`` order: (among ranks, among micro-batches of a round).
    """
    orders: dict[str, list[tuple[float, float]]] = {"natural": [], "balanced": []}
    for costs in steps:
        divided = topology.divide_rows(len(costs) // topology.rows_per_step)
        for name, order in (("natural", slice(None)), ("balanced", balance(costs, divided))):
            grid = costs[order].reshape(topology.rounds, topology.ranks, -1).sum(2)
            ranks, heaviest = grid.sum(0), grid.max(1) / np.maximum(grid.mean(1), 1e-30)
            orders[name].append((float(ranks.max() / ranks.mean()), float(heaviest.mean())))
    means = {name: np.mean(ratios, axis=0).tolist() for name, ratios in orders.items()}
    return {name: (ranks, rounds) for name, (ranks, rounds) in means.items()}
