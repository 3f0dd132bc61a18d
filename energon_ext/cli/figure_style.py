# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The style of figures: colours, frames, axes, lines, and labels next to lines instead of a legend.

The colours are Okabe and Ito's, which colour-blind readers can tell apart.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from energon_ext.cli import plural
from energon_ext.metrics.file import Run

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#8C6D31", "#6F6F6F")
INK, MUTED, FAINT = "#222222", "#6B6B6B", "#DDDDDD"
ROUND_TICKS = [1, 2, 5, 10]
WIDTH_INCHES = 9.0
LABEL_INCHES = 0.16

WINDOWS = 30
MAX_LABEL = 18
PERCENT = "{x:.0f} %"

#: Up to this many marks are drawn over the full height, and up to this many are named.
MAX_LINES, MAX_NAMED = 12, 3

#: Sums over steps, or over sources.
Sums = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True, slots=True)
class Picture:
    """A figure of the report, with the name of its PNG and its caption."""

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
    """Return a figure with a title and a subtitle, and its empty axes, row by row.

    ``height``, and ``top`` above the axes, are in inches; ``left`` is a fraction of the width.
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
    for axes in grid.flat:
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(FAINT)
        axes.tick_params(colors=MUTED, labelsize=9, color=FAINT)
        axes.yaxis.label.set(color=MUTED, fontsize=9)
        axes.xaxis.label.set(color=MUTED, fontsize=9)
        axes.grid(axis="y", color=FAINT, linewidth=0.6, alpha=0.7)
        axes.set_axisbelow(True)
    return figure, list(grid.flat)


def steps_axis(axes: Axes, run: Run, named: bool = True) -> None:
    """Label the x-axis with optimizer steps, and mark where the run was resumed."""
    whole_steps(axes, int(run.step[-1]) + 1)
    mark_steps(axes, np.array(run.resumed_after) + 0.5)
    name_steps(axes, "resumed after", run.resumed_after if named else ())


def mark_steps(axes: Axes, places: np.ndarray) -> None:
    """Draw a dashed vertical line at each place; short ones at the top if there are many."""
    low = 0 if len(places) <= MAX_LINES else 0.96
    dashes = [(0, (4, 3))]
    heights = axes.get_xaxis_transform()
    axes.vlines(places, low, 1, MUTED, dashes, linewidth=0.9, transform=heights)  # type: ignore[arg-type]


def name_steps(axes: Axes, what: str, steps: Sequence[int]) -> None:
    """Write the first few marked steps above the axes."""
    if not len(steps):
        return
    named = ", ".join(f"{step:,}" for step in steps[:MAX_NAMED])
    on_right = steps[0] > 0.6 * axes.get_xlim()[1]
    axes.annotate(
        f"{what} step{'s' * (len(steps) > 1)} {named}" + ", ..." * (len(steps) > MAX_NAMED),
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
    """Label the x-axis with optimizer steps from ``start`` to ``stop``."""
    axes.set_xlim(start, stop)
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True, steps=ROUND_TICKS))
    axes.set_xlabel("optimizer step")


def label_ends(axes: Axes, values: np.ndarray, names: Sequence[str], colors: Sequence[str]) -> None:
    """Write each name at the right edge, next to the last value of its line; none for NaN."""
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
    """Return positions near the values, in the same order, >= ``low`` and ``gap`` apart.

    Each is midway between pushing labels up from below and pushing them down from above.

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


def largest_sources(tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray, Sums]:
    """Return the largest sources, one per colour, the others, and a sum that merges the others."""
    order = np.argsort(-tokens, kind="stable")
    most = len(COLORS) - (len(order) > len(COLORS))
    kept, others = np.sort(order[:most]), order[most:]
    columns, firsts = [*kept, *others], np.arange(min(len(order), len(COLORS)))
    return kept, others, lambda values: np.add.reduceat(values[..., columns], firsts, axis=-1)


def windows(steps: np.ndarray) -> tuple[Sums, np.ndarray]:
    """Return a sum over windows of equal length (the last may be shorter), and their lengths."""
    firsts = np.arange(0, len(steps), -(-len(steps) // WINDOWS))
    return lambda values: np.add.reduceat(values, firsts), np.diff(firsts, append=len(steps))


def window_size(steps: np.ndarray) -> str:
    size, last = int(steps[0]), int(steps[-1])
    return plural(size, "step") + (f", {last} at the end" if last < size else "")


def shares(tokens: np.ndarray) -> np.ndarray:
    return tokens / np.maximum(tokens.sum(1, keepdims=True), 1)


def draw_steps(
    axes: Axes,
    edges: np.ndarray,
    shares: np.ndarray,
    labels: Sequence[str],
    ends: np.ndarray | None = None,
) -> None:
    """Draw shares > 0 as step functions, each labelled with its name and its last share.

    Args:
        edges: [n + 1], steps at which the shares change.
        shares: float64 [n, sources].
        ends: [sources], steps after which a source has ended.
    """
    lasts, names = [], []
    for index, (values, color) in enumerate(zip(shares.T, COLORS)):
        present = np.flatnonzero(values > 0)
        last = present[-1] if len(present) else -1
        steps = edges if ends is None else edges.clip(None, ends[index])
        percent = np.where(values > 0, 100 * values, np.nan)
        heights = np.append(percent, percent[-1])  # the last step needs an end, too
        (line,) = axes.plot(steps, heights, color=color, linewidth=1.7, drawstyle="steps-post")
        line.set_solid_capstyle("butt")  # end exactly where the source ends
        lasts.append(percent[last])
        ongoing = last in (-1, len(values) - 1)
        shown = PERCENT.format(x=percent[last]) if ongoing else f"to step {int(steps[last + 1]):,}"
        names.append(f"{labels[index]} {shown}")
    axes.yaxis.set_major_formatter(PERCENT)
    label_ends(axes, np.array(lasts), names, COLORS)


def draw_lines(
    axes: Axes,
    lines: Sequence[Sequence[np.ndarray] | np.ndarray],
    labels: Sequence[str],
    colors: Sequence[str] = COLORS,
    dots: bool = False,
) -> list[str]:
    """Draw (x, y) lines, each labelled at its end; return the labels with the last values.

    Values are marked by dots if they are sparse, or if ``dots`` is True.
    """
    for (x, values), color in zip(lines, colors):
        known = np.isfinite(values)
        is_dense = not dots and len(values) > 1 and known.mean() > 0.5
        style = "-" if is_dense else "o-"
        axes.plot(x[known], values[known], style, color=color, linewidth=1.7, markersize=4)
    ends = np.array([last_known(values) for _, values in lines])
    names = [f"{label} {end:.2f}" for label, end in zip(labels, ends)]
    label_ends(axes, ends, names, colors)
    return names


def last_known(values: np.ndarray) -> float:
    """Return the last finite value; NaN if there is none."""
    known = values[np.isfinite(values)]
    return float(known[-1]) if len(known) else np.nan


def clip_labels(labels: Sequence[str]) -> list[str]:
    """Abbreviate long labels in the middle.

    Example:
        >>> clip_labels(["a_very_long_name_of_web_pages_1", "code"])
        ['a_very_lo…_pages_1', 'code']
    """
    half = MAX_LABEL // 2
    short = [f"{label[:half]}…{label[1 - half :]}" for label in labels]
    return [a if len(a) <= MAX_LABEL else b for a, b in zip(labels, short)]
