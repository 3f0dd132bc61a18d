# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The table and the figure of ``07_online_mixing.py --compare``."""

import json
import sys

import numpy as np
from demo_corpora import CORPORA

from energon_ext.cli.figure_style import COLORS, label_ends, new_figure, whole_steps


def compare(runs, path):
    """Print the losses on unseen text after the last step, and draw all evaluations.

    Args:
        runs: (mix name, seed) -> log of the run.
        path: path of the PNG.
    """
    by_mix = {}
    for (mix, _), log in runs.items():
        by_step = {event["step"]: losses_of(event) for event in events(log, "evaluation")}
        by_mix.setdefault(mix, []).append([list(losses.values()) for losses in by_step.values()])
    by_mix = {mix: np.array(losses) for mix, losses in by_mix.items()}  # [seeds, steps, sources]
    print(f"\nloss on unseen text after {max(by_step)} steps, mean of seeds (smallest, largest)")
    print("".join(f"{name:>24}" for name in ("", "mean of sources", *CORPORA)))
    for mix, losses in by_mix.items():
        last = np.column_stack([losses[:, -1].mean(1), losses[:, -1]])
        cells = [f"{x.mean():.3f} ({x.min():.3f}, {x.max():.3f})" for x in last.T]
        print("".join(f"{cell:>24}" for cell in (mix, *cells)))
    draw(list(by_step), by_mix, shares_of(runs["controlled", 1]), path)
    print(path)


def losses_of(evaluation):
    """Return each source's loss on unseen text from an evaluation, whose keys are paths."""
    return {
        name: next(loss for key, loss in evaluation.items() if key.endswith(f"/{name}/val"))
        for name in CORPORA
    }


def last_losses(log, step=sys.maxsize):
    """Return the losses of the last evaluation in a log, up to a step."""
    *_, last = (event for event in events(log, "evaluation") if event["step"] <= step)
    return losses_of(last)


def shares_of(log):
    """Return the planned share of each source in each step: float64 [steps, sources]."""
    names = next(events(log, "start"))["names"]
    shares = []
    for event in events(log, "step"):
        by_name = {names[key]: share for key, share in event["planned_share"].items()}
        shares.append([by_name[name] for name in CORPORA])
    return np.array(shares)


def events(log, kind):
    for line in log.read_text().splitlines():
        if (event := json.loads(line))["event"] == kind:
            yield event


def draw(steps, losses, shares, path):
    seeds = len(losses["controlled"])
    figure, (above, below) = new_figure(
        "Weights set by a controller, compared with constant and scheduled weights",
        f"above: mean loss of the sources on unseen text, by step, one line for each of {seeds} "
        "seeds · below: the shares set by the controller with the first seed",
        height=5.2,
        height_ratios=(1, 1),
    )
    for values, color in zip(losses.values(), COLORS):
        above.plot(steps[1:], values[:, 1:].mean(2).T, color=color, linewidth=1.2, marker="o", ms=3)
    ends = np.array([values[:, -1].mean() for values in losses.values()])
    whole_steps(above, len(shares))
    above.set_xlabel("")
    above.tick_params(labelbottom=False)
    label_ends(above, ends, list(losses), COLORS)
    above.set_ylabel("loss (nats per byte)")
    below.plot(np.arange(1, len(shares) + 1), shares, linewidth=1.6, drawstyle="steps-mid")
    for line, color in zip(below.lines, COLORS[3:]):
        line.set_color(color)
    whole_steps(below, len(shares))
    label_ends(below, shares[-1], list(CORPORA), COLORS[3:])
    below.set_ylabel("share")
    figure.savefig(path, dpi=120)
