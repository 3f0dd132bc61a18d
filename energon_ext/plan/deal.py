# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Deal the rows of a step to ranks and micro-batches."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from megatron.energon import WorkerConfig

from energon_ext.errors import ConfigError

#: Ranks swap rows until the busiest is so near to the mean, and so often at most.
NEARLY_EQUAL, MOST_SWAPS = 1.005, 256


@dataclass(frozen=True)
class Topology:
    """The ranks, workers and micro-batches of a run.

    The rows of a step go out in rounds, of one batch to each rank: rank r has the rows
    ``[r * batch_rows, (r + 1) * batch_rows)`` of a round, and the workers of a rank take turns.

    Attributes:
        rows_per_step: rows of a global batch, a multiple of those of a round.
        batch_rows: rows of one batch of one rank.
        ranks, rank: data-parallel ranks, and which of them this is.
        workers: worker processes of a rank; 1 where the rank itself reads.

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

    def __post_init__(self) -> None:
        if self.rows_per_step < 1 or self.rows_per_step % self.rows_per_round:
            raise ConfigError(
                f"rows_per_step: {self.rows_per_step} found; it must be a multiple of batch_size x "
                f"data-parallel ranks = {self.batch_rows} x {self.ranks}."
            )

    @classmethod
    def of(
        cls, worker_config: WorkerConfig, batch_rows: int | None, rows_per_step: int | None
    ) -> "Topology":
        """The topology of an Energon dataset; one round per step unless told otherwise."""
        batch_rows = batch_rows or 1
        return cls(
            rows_per_step or batch_rows * worker_config.world_size,
            batch_rows,
            worker_config.world_size,
            worker_config.rank,
            max(1, worker_config.num_workers),
        )

    @property
    def rows_per_round(self) -> int:
        """Rows that all ranks read together in one batch each."""
        return self.batch_rows * self.ranks

    @property
    def rounds(self) -> int:
        """Batches of a rank in a step."""
        return self.rows_per_step // self.rows_per_round

    def rows_of(self, number: int) -> range:
        """Rows of this rank in a round of a step."""
        first = number * self.rows_per_round + self.rank * self.batch_rows
        return range(first, first + self.batch_rows)


def balanced(costs: np.ndarray, topology: Topology) -> np.ndarray:
    """Order the rows of a step so that all ranks are busy equally long.

    Rows are assigned from the most to the least expensive, each to the rank with the smallest total
    that has room (longest processing time first, Graham 1969, with as many rows for every rank);
    then the ranks with the largest and the smallest total swap rows. A rank hands out its most
    expensive rows first, so that the batches of one round are alike; a batch of several rows holds
    expensive ones beside cheap ones.

    Args:
        costs: float64 [rows per step], of the rows by number.

    Returns:
        int64 [rows per step]: the row at each place, see :meth:`Topology.rows_of`.

    Example:
        >>> topology = Topology(rows_per_step=4, ranks=2)
        >>> balanced(np.array([9.0, 1.0, 8.0, 4.0]), topology).tolist()  # 9 + 1 and 8 + 4
        [0, 2, 1, 3]
    """
    ranks, rounds, batch_rows = topology.ranks, topology.rounds, topology.batch_rows
    of_rank: list[list[int]] = [[] for _ in range(ranks)]
    lightest = [(0.0, rank) for rank in range(ranks)]  # a heap
    ordered = np.argsort(-costs, kind="stable")
    for row, cost in zip(ordered.tolist(), costs[ordered].tolist()):
        busy, rank = lightest[0]
        of_rank[rank].append(row)
        if len(of_rank[rank]) < rounds * batch_rows:
            heapq.heapreplace(lightest, (busy + cost, rank))
        else:
            heapq.heappop(lightest)
    rows = _swapped(np.array(of_rank), costs)
    # Every second row of the batches goes to them the other way round.
    dealt = rows.reshape(ranks, batch_rows, rounds)
    dealt[:, 1::2] = dealt[:, 1::2, ::-1]
    return dealt.transpose(2, 0, 1).reshape(-1)


def _swapped(rows: np.ndarray, costs: np.ndarray) -> np.ndarray:
    """Rows of each rank, the most expensive first, int64 [ranks, rows], after some swaps."""
    busy = costs[rows].sum(1)
    enough = NEARLY_EQUAL * busy.mean()
    for _ in range(MOST_SWAPS):
        most, least = busy.argmax(), busy.argmin()
        gap = busy[most] - busy[least]
        gains = costs[rows[most]][:, None] - costs[rows[least]]
        one, other = np.unravel_index(np.abs(gains - gap / 2).argmin(), gains.shape)
        if busy[most] <= enough or not 0 < gains[one, other] < gap:
            break
        rows[most, one], rows[least, other] = rows[least, other], rows[most, one]
        busy[most] -= gains[one, other]
        busy[least] += gains[one, other]
    return np.take_along_axis(rows, np.argsort(-costs[rows], axis=1, kind="stable"), axis=1)


def imbalance(steps: Iterable[np.ndarray], topology: Topology) -> dict[str, tuple[float, float]]:
    """How much longer the busiest takes than the mean, on average over steps.

    Args:
        steps: costs of the rows of each, float64 [rows per step].
        topology: who reads them.

    Returns:
        ``natural`` and ``dealt``, each (ranks, micro-batches of a round): heaviest over mean.
    """
    orders: dict[str, list[tuple[float, float]]] = {"natural": [], "dealt": []}
    for costs in steps:
        for name, order in (("natural", slice(None)), ("dealt", balanced(costs, topology))):
            grid = costs[order].reshape(topology.rounds, topology.ranks, -1).sum(2)
            ranks, heaviest = grid.sum(0), grid.max(1) / np.maximum(grid.mean(1), 1e-30)
            orders[name].append((float(ranks.max() / ranks.mean()), float(heaviest.mean())))
    means = {name: np.mean(found, axis=0).tolist() for name, found in orders.items()}
    return {name: (ranks, rounds) for name, (ranks, rounds) in means.items()}
