# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The picture of a forecast: planned shares, what is read, and epochs."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes

from energon_ext.cli import counted
from energon_ext.cli.figure_lines import clipped, draw_lines, draw_steps, joining, shares, windows
from energon_ext.cli.figure_style import (
    COLORS,
    Picture,
    mark_steps,
    name_steps,
    new_figure,
    whole_steps,
)
from energon_ext.cli.metrics import short_labels
from energon_ext.plan.forecast import Forecast


def forecast_picture(found: Forecast) -> Picture:
    """Share and epochs of every source over the steps of a forecast."""
    kept, others, join = joining(found.tokens.sum(0))
    names = {key: title for key, title in zip(found.keys, found.titles) if key != title}
    labels = clipped(np.array(short_labels(found.keys, names))[kept].tolist())
    labels += [f"{len(others)} others"] if len(others) else []
    last = int(found.ends[-1])
    ends = np.array([found.exhausted.get(found.keys[index], last) for index in kept])
    add, sizes = windows(found.ends)
    figure, (upper, lower) = new_figure(
        "What the run will read",
        f"above: planned shares; dots: of the tokens, in {counted(len(sizes), 'part')} of the run"
        " · below: epochs · dashed: breakpoints · ×: a source ends",
        height=6.4,
        height_ratios=(3, 2),
    )
    points = found.breakpoints
    for axes in (upper, lower):
        whole_steps(axes, last, found.first)
        mark_steps(axes, np.array(points))
    name_steps(upper, "breakpoint" + "s" * (len(points) > 1) + " at", points)
    upper.set_ylabel("share of the tokens")
    upper.tick_params(labelbottom=False)
    upper.set_xlabel("")
    edges, drawn = np.append(found.first, found.ends), 100 * shares(join(add(found.tokens)))
    parts = edges[np.append(0, sizes.cumsum())]
    for values, color in zip(drawn.T, COLORS):
        dots = ((parts[1:] + parts[:-1]) / 2)[values > 0], values[values > 0]
        upper.plot(*dots, "o", color=color, markersize=3.6)
    planned = join(found.shares)
    upper.set_ylim(0, min(102, 1.15 * max(100 * planned.max(), drawn.max())))
    draw_steps(upper, edges, planned, labels, np.append(ends, [last] * (len(others) > 0)))
    _draw_epochs(lower, found, kept, ends, labels)
    ends_early = len(found.exhausted)
    ended = f"; {ends_early} of them end{'s' * (ends_early == 1)} before" if ends_early else ""
    return Picture(
        "forecast",
        figure,
        f"{found.tokens.sum():,.0f} tokens of {counted(len(found.keys), 'source')} in "
        f"{counted(found.steps, 'step')}{ended}.",
    )


def _draw_epochs(
    axes: Axes, found: Forecast, kept: np.ndarray, ends: np.ndarray, labels: Sequence[str]
) -> None:
    """Epochs of sources, from the window that reads the first token to the step of the last."""
    read, edges = found.tokens[:, kept] > 0, np.append(found.first, found.ends)
    epochs = np.vstack((found.epochs_before, found.epochs))[:, kept]
    epochs[:, ~read.any(0)] = np.nan
    axes.set_ylabel("epochs")
    axes.set_ylim(0, 1.1 * max(found.epochs[:, kept].max(), 1e-9))
    draw_lines(axes, edges[:, None].clip(edges[read.argmax(0)], ends), epochs, labels)
    for index, end, last, color in zip(kept, ends, epochs[-1], COLORS):
        if found.keys[index] in found.exhausted:
            axes.plot(end, last, "x", color=color, markeredgewidth=2, clip_on=False)
