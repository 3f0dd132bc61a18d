# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Draw grpo.png from runs of examples/03_grpo.py: python draw_grpo.py CONTROL RUN RUN ..."""

import json
import sys
from pathlib import Path

from energon_ext.cli.figure_style import COLORS, MUTED, new_figure


def accuracy(run, kind):
    """Return the evaluated steps, and the share of correct answers at each."""
    lines = map(json.loads, (Path(run) / "grpo" / "metrics.jsonl").open())
    points = [(line["step"], line[kind]) for line in lines if kind in line]
    return zip(*points)


def main(control, *runs):
    figure, (sampled, greedy) = new_figure(
        "A GPT learns to sort four digits from rewards alone",
        "Share of correct answers to 512 held-out prompts by step of GRPO; one line per seed, "
        "dashed: random rewards.",
        height=3.4,
        columns=2,
        top=0.95,
    )
    for axes, kind in ((sampled, "eval/sampled"), (greedy, "eval/greedy")):
        for run, color in zip(runs, COLORS):
            axes.plot(*accuracy(run, kind), color=color, linewidth=2)
        axes.plot(*accuracy(control, kind), color=MUTED, linewidth=2, linestyle="--")
        axes.set_title(kind.partition("/")[2], loc="left", fontsize=10.5)
        axes.set_ylim(-0.02, 1.02)
        axes.set_xlabel("step", fontsize=8.5, color=MUTED)
        box = axes.get_position()
        axes.set_position([box.x0, 0.15, box.width, box.y1 - 0.15])  # room for the x axis
    figure.savefig(Path(__file__).with_name("grpo.png"), dpi=120)


if __name__ == "__main__":
    main(*sys.argv[1:])
