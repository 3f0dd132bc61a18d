# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The lines of a picture: of how many sources, over which windows, with which names."""

from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.axes import Axes

from energon_ext.cli import counted
from energon_ext.cli.figure_style import COLORS, label_ends

WINDOWS = 30
MAX_LABEL = 18
PERCENT = "{x:.0f} %"

#: Adds up steps, or sources.
Sums = Callable[[np.ndarray], np.ndarray]


def joining(tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray, Sums]:
    """The sources of most tokens, as many as have a colour; the others; and what adds these up."""
    order = np.argsort(-tokens, kind="stable")
    most = len(COLORS) - (len(order) > len(COLORS))
    kept, others = np.sort(order[:most]), order[most:]
    columns, firsts = [*kept, *others], np.arange(min(len(order), len(COLORS)))
    return kept, others, lambda values: np.add.reduceat(values[..., columns], firsts, axis=-1)


def windows(steps: np.ndarray) -> tuple[Sums, np.ndarray]:
    """Sums over windows of one length, but for the last one; and how many steps are in each."""
    firsts = np.arange(0, len(steps), -(-len(steps) // WINDOWS))
    return lambda values: np.add.reduceat(values, firsts), np.diff(firsts, append=len(steps))


def each_of(steps: np.ndarray) -> str:
    size, last = int(steps[0]), int(steps[-1])
    return counted(size, "step") + (f", {last} at the end" if last < size else "")


def shares(tokens: np.ndarray) -> np.ndarray:
    return tokens / np.maximum(tokens.sum(1, keepdims=True), 1)


def draw_steps(
    axes: Axes,
    edges: np.ndarray,
    shares: np.ndarray,
    labels: Sequence[str],
    ends: np.ndarray | None = None,
) -> None:
    """Draw shares as steps, where a source has one, each with its name and its last share.

    Args:
        edges: steps at which the shares change, float64 [n + 1].
        shares: float64 [n, sources].
        ends: of each source, the step after which it has none; by default it has one to the end.
    """
    lasts, names = [], []
    for index, (values, color) in enumerate(zip(shares.T, COLORS)):
        present = np.flatnonzero(values > 0)
        last = present[-1] if len(present) else -1
        own = edges if ends is None else edges.clip(None, ends[index])
        percent = np.where(values > 0, 100 * values, np.nan)
        heights = np.append(percent, percent[-1])  # the last step has an end as well
        (line,) = axes.plot(own, heights, color=color, linewidth=1.7, drawstyle="steps-post")
        line.set_solid_capstyle("butt")  # a line ends where its source does
        lasts.append(percent[last])
        stays = last in (-1, len(values) - 1)
        shown = PERCENT.format(x=percent[last]) if stays else f"to step {int(own[last + 1]):,}"
        names.append(f"{labels[index]} {shown}")
    axes.yaxis.set_major_formatter(PERCENT)
    label_ends(axes, np.array(lasts), names, COLORS)


def draw_lines(
    axes: Axes,
    places: np.ndarray,
    lines: np.ndarray,
    labels: Sequence[str],
    shown: str = "{x:.2f}",
    colors: Sequence[str] = COLORS,
) -> list[str]:
    """Draw columns as lines through the values that are known, each with its name at its end.

    Args:
        places: of the values, for all lines or a column for each.
        shown: how the last value is written after a name.

    Returns:
        The names with the values.
    """
    columns = np.broadcast_to(places if places.ndim > 1 else places[:, None], lines.shape)
    for xs, values, color in zip(columns.T, lines.T, colors):
        known = np.isfinite(values)
        style = "-" if known.mean() > 0.5 and len(values) > 1 else "o-"
        axes.plot(xs[known], values[known], style, color=color, linewidth=1.7, markersize=4)
    ends = np.array([last_known(values) for values in lines.T])
    names = [f"{label} {shown.format(x=end)}" for label, end in zip(labels, ends)]
    label_ends(axes, ends, names, colors)
    return names


def last_known(values: np.ndarray) -> float:
    """The last number, NaN where there is none."""
    known = values[np.isfinite(values)]
    return float(known[-1]) if len(known) else np.nan


def clipped(labels: Sequence[str]) -> list[str]:
    """Labels that are short in the middle.

    Example:
        >>> clipped(["a_very_long_name_of_web_pages_1", "code"])
        ['a_very_lo…_pages_1', 'code']
    """
    half = MAX_LABEL // 2
    return [
        label if len(label) <= MAX_LABEL else f"{label[:half]}…{label[1 - half :]}"
        for label in labels
    ]
