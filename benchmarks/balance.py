# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Load balance of 64 ranks: rows in natural order, balanced by cost, and by largest differencing.

The rows are packed from web-like documents, and have the cost of a model with 8 billion
parameters. verl and slime divide sequences among ranks with the largest differencing method
(Karmarkar and Karp, 1982), with the same number of rows for every rank; each rank then reads its
rows in their natural order.
"""

import heapq
import itertools

import numpy as np
from timing import markdown, microseconds

from energon_ext.packing import BestFitPacker, Pieces
from energon_ext.plan.cost import AttentionCost
from energon_ext.plan.topology import Topology, balance

RANKS, STEPS, DOCUMENTS = 64, 10, 4096
CASES = [(8192, 8), (8192, 4), (32768, 8), (32768, 4), (131072, 8), (131072, 4), (32768, 1)]


def run():
    table = [row for seq_len, rounds in CASES for row in measure(seq_len, rounds)]
    header = (
        "",
        "busiest rank over the mean",
        "heaviest micro-batch of a round over the mean",
        "µs per row",
    )
    return markdown(f"Balanced steps of {RANKS} ranks, means of {STEPS} steps", header, table)


def measure(seq_len, rounds):
    rng = np.random.default_rng(0)
    topology = Topology(RANKS * rounds, 1, RANKS)
    steps = row_costs(rng, seq_len, STEPS * RANKS * rounds).reshape(STEPS, -1)
    contenders = {
        "natural": lambda costs: np.arange(len(costs)),
        "balanced": lambda costs: balance(costs, topology),
        "largest differencing": lambda costs: differenced(costs, RANKS),
    }
    times = microseconds({name: timed(order, steps) for name, order in contenders.items()}, 1, 3)
    for name, order in contenders.items():
        grids = [costs[order(costs)].reshape(rounds, RANKS) for costs in steps]
        ranks = np.mean([grid.sum(0).max() / grid.sum(0).mean() for grid in grids])
        waits = np.mean([(grid.max(1) / grid.mean(1)).mean() for grid in grids])
        several = "es" * (rounds > 1)
        title = f"rows of {seq_len:,}, {rounds} micro-batch{several} per rank, {name}"
        yield title, f"{ranks:.3f}", f"{waits:.3f}", f"{times[name] / steps.size:.2f}"


def timed(order, steps):
    return lambda _: [order(costs) for costs in steps]


def row_costs(rng, seq_len, count):
    """Return the costs of packed rows, in a random order."""
    packer, cost, found = BestFitPacker(seq_len), AttentionCost(), []
    while sum(map(len, found)) < count:
        lengths = np.clip(np.exp(rng.normal(6.2, 1.2, DOCUMENTS)), 1, 200_000).astype(np.int64)
        numbers = np.arange(DOCUMENTS)
        plan = packer.plan(Pieces.none(), Pieces.whole(numbers, lengths))
        costs = cost(plan.pieces.stops - plan.pieces.starts)
        found.append(np.add.reduceat(costs, np.concatenate(([0], plan.ends[:-1]))))
    return rng.permutation(np.concatenate(found)[:count])


def differenced(costs, ranks):
    """Return the rows in the order of rounds and ranks, divided by largest differencing."""
    ordered, order = np.argsort(-costs, kind="stable"), itertools.count()
    heap = []
    for block in ordered.reshape(-1, ranks):
        group = [(float(costs[row]), [int(row)]) for row in block]
        heap.append((group[-1][0] - group[0][0], next(order), group))
    heapq.heapify(heap)  # the widest spread first
    while len(heap) > 1:
        one, other = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        merged = sorted(
            ((a + b, rows + others) for (a, rows), (b, others) in zip(one, reversed(other))),
            key=lambda each: -each[0],
        )
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], next(order), merged))
    return np.array([sorted(rows) for _, rows in heap[0][2]]).T.reshape(-1)
