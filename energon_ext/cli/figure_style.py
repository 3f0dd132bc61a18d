# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""How the pictures look: colours, frame, axes, and names beside the lines in place of a legend.

The colours are Okabe and Ito's, which color-blind readers can tell apart.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from energon_ext.cli.metrics import Run

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#8C6D31", "#6F6F6F")
INK, MUTED, FAINT = "#222222", "#6B6B6B", "#DDDDDD"
ROUND_TICKS = [1, 2, 5, 10]
WIDTH_INCHES = 9.0
LABEL_INCHES = 0.16

#: Marks that are drawn as lines, and that are named; more are short, and not named.
MOST_LINES, MOST_NAMED = 12, 3


@dataclass(frozen=True, slots=True)
class Picture:
    """A figure for the report, with the name of its PNG and a caption."""

    name: str
    figure: Figure
    caption: str


def new_figure(
    title: str,
    subtitle: str,
    height: float = 4.2,
    columns: int = 1,
    height_ratios: Sequence[float] = (1,),
    top: float = 0.8,
    left: float = 0.085,
) -> tuple[Figure, list[Axes]]:
    """A figure with a title, a line on how to read it, and empty axes, row by row.

    ``height``, and ``top`` above the axes, are inches; ``left`` is a share of the width.
    """
    figure = Figure(figsize=(WIDTH_INCHES, height), facecolor="white")
    place = {
        "left": left,
        "right": 0.79 if columns == 1 else 0.98,
        "top": 1 - top / height,
        "bottom": (0.55 if columns == 1 else 0.1) / height,
        "hspace": 0.12,
        "wspace": 0.06,
    }
    rows = len(height_ratios)
    grid = figure.subplots(
        rows, columns, squeeze=False, height_ratios=height_ratios, gridspec_kw=place
    )
    figure.text(0.012, 1 - 0.3 / height, title, fontsize=13, fontweight="bold", color=INK)
    figure.text(0.012, 1 - 0.52 / height, subtitle, fontsize=8.5, color=MUTED)
    for one in grid.flat:
        one.spines[["top", "right"]].set_visible(False)
        one.spines[["left", "bottom"]].set_color(FAINT)
        one.tick_params(colors=MUTED, labelsize=9, color=FAINT)
        one.yaxis.label.set(color=MUTED, fontsize=9)
        one.xaxis.label.set(color=MUTED, fontsize=9)
        one.grid(axis="y", color=FAINT, linewidth=0.6, alpha=0.7)
        one.set_axisbelow(True)
    return figure, list(grid.flat)


def steps_axis(axes: Axes, run: Run, named: bool = True) -> None:
    """Make the x axis one of optimizer steps, and mark where the run was resumed."""
    whole_steps(axes, int(run.step[-1]) + 1)
    mark_steps(axes, np.array(run.resumed_after) + 0.5)
    name_steps(axes, "resumed after", run.resumed_after if named else ())


def mark_steps(axes: Axes, places: np.ndarray) -> None:
    """Draw a dashed line at each place; where there are many, a short one at the top."""
    low = 0 if len(places) <= MOST_LINES else 0.96
    marks = LineCollection(
        [[(place, low), (place, 1)] for place in places.tolist()],
        colors=MUTED,
        linewidths=0.9,
        linestyles=[(0, (4, 3))],
        transform=axes.get_xaxis_transform(),
    )
    axes.add_collection(marks, autolim=False)  # heights are none of the data


def name_steps(axes: Axes, what: str, steps: Sequence[int]) -> None:
    """Write the first marked steps above the axes, where no line is, behind what is there."""
    if not len(steps):
        return
    named = ", ".join(f"{step:,}" for step in steps[:MOST_NAMED])
    on_right = steps[0] > 0.6 * axes.get_xlim()[1]
    axes.annotate(
        f"{what} step{'s' * (len(steps) > 1)} {named}" + ", ..." * (len(steps) > MOST_NAMED),
        (steps[0], 1),
        xycoords=("data", "axes fraction"),
        xytext=(0, 3),
        textcoords="offset points",
        ha="right" if on_right else "left",
        va="bottom",
        fontsize=8.5,
        color=MUTED,
    )


def whole_steps(axes: Axes, stop: int, start: int = 0) -> None:
    """Make the x axis one of optimizer steps from ``start`` to ``stop``."""
    axes.set_xlim(start, stop)
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True, steps=ROUND_TICKS))
    axes.set_xlabel("optimizer step")


def label_ends(axes: Axes, values: np.ndarray, names: Sequence[str], colors: Sequence[str]) -> None:
    """Write names at the right edge, each beside the value where its line ends; NaN has no name."""
    named = np.flatnonzero(np.isfinite(values))
    low, high = axes.get_ylim()
    figure = axes.get_figure(root=True)
    assert figure is not None
    inches = axes.get_position().height * figure.get_figheight()
    gap = LABEL_INCHES / inches * (high - low)
    for index, height in zip(named.tolist(), _spread(values[named], gap, low + gap / 2)):
        axes.annotate(
            names[index],
            (1, height),
            xycoords=("axes fraction", "data"),
            xytext=(8, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            color=colors[index],
            annotation_clip=False,
        )


def _spread(values: np.ndarray, gap: float, low: float) -> np.ndarray:
    """Positions close to the values, in their order, above ``low`` and at least ``gap`` apart.

    Each lies in the middle between pushing labels up from below and down from above.

    Example:
        >>> _spread(np.array([5.0, 1.0, 5.0, 0.0]), gap=1.0, low=0.5).tolist()
        [4.5, 1.5, 5.5, 0.5]
    """
    order = np.argsort(values, kind="stable")
    gaps = gap * np.arange(len(values))
    apart = values[order] - gaps
    up = np.maximum.accumulate(apart)
    down = np.minimum.accumulate(apart[::-1])[::-1]
    positions = np.empty(len(values))
    positions[order] = np.maximum((up + down) / 2, low) + gaps
    return positions
