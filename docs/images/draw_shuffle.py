# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Draw shuffle.png: means of steps for documents in input order and in random order."""

from pathlib import Path

import numpy as np

from energon_ext.cli.figure_style import COLORS, FAINT, MUTED, new_figure
from energon_ext.plan.order import EpochOrder

DOCUMENTS, SITE, STEP = 2**20, 4096, 7168
BLOCKS = {"block": 256, "mixed": 64}


def main() -> None:
    rng = np.random.default_rng(0)
    values = rng.normal(size=DOCUMENTS // SITE).repeat(SITE)
    values /= values.std()
    sigma = STEP**-0.5
    orders = {
        "order of the input, one permutation": (values, {}),
        "random order, blocks": (rng.permutation(values), BLOCKS),
        "order of the input, blocks (refused)": (values, BLOCKS),
    }
    figure, panels = new_figure(
        "Steps of 7168 documents, from 2^20 documents of 256 sites",
        "a dot per step: the mean of a property that all documents of a site share; grey: two "
        "standard deviations of a random draw",
        height=3.4,
        columns=3,
        top=1.05,
    )
    for number, (axes, (name, (stored, blocks))) in enumerate(zip(panels, orders.items())):
        means = step_means(stored, blocks)
        axes.axhspan(-2 * sigma, 2 * sigma, color=FAINT)
        axes.plot(means, ".", color=COLORS[number == 2], markersize=4)
        spread = f"{means.std() / sigma:.1f} times the spread of a random draw"
        axes.set_title(f"{name}\n{spread}", fontsize=9, color=MUTED, loc="left")
        axes.set_ylim(-0.35, 0.35)
        axes.set_xticks([])
        if number:
            axes.set_yticklabels([])
    figure.savefig(Path(__file__).parent / "shuffle.png", dpi=160)


def step_means(stored: np.ndarray, blocks: dict[str, int]) -> np.ndarray:
    """Return the mean of each step of an epoch; ``stored`` are the values in stored order."""
    order = EpochOrder(DOCUMENTS, "web", **blocks).take(DOCUMENTS)
    steps = DOCUMENTS // STEP
    return stored[order[: steps * STEP]].reshape(steps, STEP).mean(1)


if __name__ == "__main__":
    main()
