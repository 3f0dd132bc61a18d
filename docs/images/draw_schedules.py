# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Draw schedules.png, with one panel for each kind of weight."""

from pathlib import Path

import numpy as np

from energon_ext.cli.figure_style import COLORS, INK, MUTED, new_figure
from energon_ext.weights import weight_from_config

POINTS = {0: 2, 100: 10, 250: 10, 400: 1}
PANELS = {
    "constant": 5,
    "step": {"step": POINTS},
    "linear": {"linear": POINTS},
    "cosine": {"cosine": POINTS},
    "exponential": {"exponential": POINTS},
}


def main():
    figure, axes = new_figure(
        "One set of breakpoints, five kinds of weight",
        "Weight by step. Breakpoints: {0: 2, 100: 10, 250: 10, 400: 1}. Outside them a schedule "
        "keeps its first and last value.",
        height=2.9,
        columns=len(PANELS),
        top=0.95,
        left=0.045,
    )
    steps = np.arange(461)
    for panel, (kind, config), color in zip(axes, PANELS.items(), COLORS):
        weight = weight_from_config(config)
        values = [weight.evaluate(int(step)) for step in steps]
        panel.plot(steps, values, color=color, linewidth=2, drawstyle="steps-post")
        points = weight.breakpoints()
        panel.plot(
            points,
            [POINTS[point] for point in points],
            "o",
            color=color,
            markersize=5,
            clip_on=False,
        )
        panel.set_title(kind, loc="left", fontsize=10.5, color=INK)
        panel.set_xlim(0, 460)
        panel.set_ylim(0, 11)
        panel.set_xticks([0, 100, 250, 400])
        panel.tick_params(labelsize=8)
        box = panel.get_position()
        panel.set_position([box.x0, 0.2, box.width, box.y1 - 0.2])  # room for the x axis
        if panel is not axes[0]:
            panel.set_yticklabels([])
    figure.text(0.5, 0.035, "step", ha="center", fontsize=8.5, color=MUTED)
    figure.savefig(Path(__file__).with_name("schedules.png"), dpi=120)


if __name__ == "__main__":
    main()
