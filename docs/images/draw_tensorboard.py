# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Draw tensorboard.png from the event files of a run: python draw_tensorboard.py RUN/tensorboard.

The run was examples/01_pretrain_gpt.py with --tensorboard, on an interleave of `web`, whose weight
falls from 4 to 1, and `notes`, whose weight rises from 1 to 4, with `max_epochs: 20`.
"""

import sys
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from energon_ext.cli.figure_style import COLORS, MUTED, new_figure

SOURCES = ("web", "notes")

#: Title of each panel, and its scalars with their line styles.
PANELS = {
    "share of the tokens": {"data/planned_share": "--", "data/share": "-"},
    "epochs": {"data/epochs": "-", "data/epochs_left": ":"},
    "loss": {"train/loss": "-"},
}


def main(folder: str) -> None:
    events = EventAccumulator(folder)
    events.Reload()
    figure, panels = new_figure(
        "What a run writes to TensorBoard for each source",
        "60 steps on an interleave of two sources whose weights change; notes has max_epochs: 20",
        height=3.8,
        columns=3,
        top=0.95,
    )
    for axes, (title, scalars) in zip(panels, PANELS.items()):
        for source, color in zip(SOURCES, COLORS):
            for scalar, style in scalars.items():
                tag = f"{scalar}/{source}"
                if tag not in events.Tags()["scalars"]:  # epochs_left needs a limit
                    continue
                points = [(each.step, each.value) for each in events.Scalars(tag)]
                axes.plot(*zip(*points), style, color=color, linewidth=1.8, label=tag)
        axes.set_title(title, loc="left", fontsize=10, color=MUTED)
        axes.set_xlabel("step", fontsize=8.5, color=MUTED)
        axes.set_ylim(bottom=0)
        box = axes.get_position()
        axes.set_position([box.x0, 0.4, box.width * 0.86, box.y1 - 0.4])
        axes.legend(loc="upper left", bbox_to_anchor=(-0.05, -0.3), fontsize=7.5, frameon=False)
    figure.savefig(Path(__file__).with_name("tensorboard.png"), dpi=130)


if __name__ == "__main__":
    main(sys.argv[1])
