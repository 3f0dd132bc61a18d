# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Draw balance.png: how long 16 ranks take for a step, in the natural order and balanced."""

from pathlib import Path

import numpy as np

from energon_ext.cli.figure_style import COLORS, MUTED, new_figure
from energon_ext.packing import BestFitPacker, Pieces
from energon_ext.plan.cost import AttentionCost
from energon_ext.plan.topology import Topology, balance

WAITING = "#dddddd"

SEQ_LEN, TOPOLOGY = 131072, Topology(rows_per_step=128, ranks=16)

#: Of 40 random steps, the one nearest to the median of both orders.
SEED = 19


def main() -> None:
    costs = row_costs(SEED)
    figure, panels = new_figure(
        "A step of 16 ranks, each with 8 rows of 131 072 tokens",
        "a bar per micro-batch, as long as it takes; then the rank waits (grey) for the last one",
        height=3.9,
        columns=2,
        top=0.95,
    )
    orders = {"natural": np.arange(len(costs)), "balanced": balance(costs, TOPOLOGY)}
    for axes, (name, order) in zip(panels, orders.items()):
        grid = costs[order].reshape(TOPOLOGY.rounds, TOPOLOGY.ranks)
        grid = grid / grid.sum(0).mean()
        begins = grid.cumsum(0) - grid
        ends, end = grid.sum(0), grid.sum(0).max()
        for round_ in range(TOPOLOGY.rounds):
            color = COLORS[round_ % 2]
            axes.barh(range(16), grid[round_], 0.78, begins[round_], color=color)
        axes.barh(range(16), end - ends, 0.78, ends, color=WAITING)
        axes.axvline(end, color=MUTED, linewidth=1, linestyle=(0, (4, 3)))
        title = f"{name}: {end:.2f} times the mean, {1 - 1 / end:.1%} waiting"
        axes.set_title(title, fontsize=10, color=MUTED, loc="left")
        axes.set_xlim(0, 1.12)
        axes.set_xticks([])
        axes.set_yticks([0, 15], ["rank 0", "rank 15"] if name == "natural" else ["", ""])
        axes.grid(False)
        axes.invert_yaxis()
    figure.savefig(Path(__file__).parent / "balance.png", dpi=160)


def row_costs(seed: int) -> np.ndarray:
    """Return the costs of packed rows of web-like documents, float64 [rows of a step]."""
    rng = np.random.default_rng(seed)
    lengths = np.clip(np.exp(rng.normal(6.2, 1.2, 32768)), 1, 200_000).astype(np.int64)
    numbers = np.arange(len(lengths))
    plan = BestFitPacker(SEQ_LEN).plan(Pieces.none(), Pieces.whole(numbers, lengths))
    pieces = AttentionCost()(plan.pieces.stops - plan.pieces.starts)
    rows = np.add.reduceat(pieces, np.concatenate(([0], plan.ends[:-1])))
    return rng.permutation(rows)[: TOPOLOGY.rows_per_step]


if __name__ == "__main__":
    main()
