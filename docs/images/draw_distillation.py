# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Draw distillation.png from runs of examples/12_distillation.py.

python draw_distillation.py RUN RUN ... -- CONTROL CONTROL ...    (controls: --alpha 0)
"""

import json
import sys
from pathlib import Path

from energon_ext.cli.figure_style import COLORS, MUTED, new_figure

TITLES = {"val/loss": "loss (nats per byte)", "val/teacher_kl": "divergence from the teacher"}


def values_of(run, kind):
    """Return the evaluated steps after the first one, and a value of each."""
    lines = map(json.loads, (Path(run) / "student" / "metrics.jsonl").open())
    return zip(*((line["step"], line[kind]) for line in lines if line.get("step") and kind in line))


def main(*runs):
    divider = runs.index("--")
    figure, panels = new_figure(
        "A student of eight documents, with and without a teacher",
        "On documents that neither has seen, by step of the student; one line per seed, dashed: "
        "labels alone.",
        height=3.4,
        columns=2,
        top=0.95,
    )
    for axes, (kind, title) in zip(panels, TITLES.items()):
        for number, run in enumerate(runs[:divider]):
            axes.plot(*values_of(run, kind), color=COLORS[number], linewidth=2)
        for number, run in enumerate(runs[divider + 1 :]):
            color = COLORS[number]
            axes.plot(*values_of(run, kind), color=color, linewidth=1.5, linestyle="--")
        axes.set_title(title, loc="left", fontsize=10.5)
        axes.set_ylim(bottom=0 if kind == "val/teacher_kl" else None)
        axes.set_xlabel("step", fontsize=8.5, color=MUTED)
        box = axes.get_position()
        axes.set_position([box.x0, 0.15, box.width, box.y1 - 0.15])  # room for the x axis
    figure.savefig(Path(__file__).with_name("distillation.png"), dpi=120)


if __name__ == "__main__":
    main(*sys.argv[1:])
