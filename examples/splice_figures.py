# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Figures of the loss over starts and offsets."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from energon_ext.cli.figure_style import COLORS, INK, MUTED, label_ends, new_figure
from energon_ext.splice import LossMap


def draw_loss_map(losses: LossMap, path: str | Path, *, most_documents: int = 6) -> None:
    """Draw the loss at every (start, offset), one panel per document, as a PNG.

    Args:
        losses: losses of a whole validation pass.
        path: path of the PNG.
        most_documents: draw only this many documents.
    """
    names = losses.names[:most_documents]
    highest = max(float(np.nanmax(losses.losses)), 1e-9)
    figure, axes = new_figure(
        "Loss by start and offset",
        "Horizontal: offset of the content in the frame. Vertical: its start in the document. Dark "
        f"is high; the darkest is {highest:.2f}.",
        height=3.2,
        columns=len(names),
        top=0.95,
        left=0.07,
    )
    for document, (name, panel) in enumerate(zip(names, axes)):
        starts, offsets, grid = losses.of(document)
        for row, values in enumerate(grid):
            shown = ~np.isnan(values)
            edges = _edges(np.array(offsets)[shown])
            panel.pcolormesh(
                edges, [row, row + 1], values[shown][None], cmap="Blues", vmin=0, vmax=highest
            )
        panel.set_title(name.rpartition("/")[2], loc="left", fontsize=10, color=INK)
        panel.set_yticks(np.arange(len(starts)) + 0.5, [f"{start}" for start in starts])
        panel.grid(False)
        panel.set_xlabel("offset")
        box = panel.get_position()
        panel.set_position((box.x0 + 0.01, 0.2, box.width - 0.02, box.y1 - 0.2))
    axes[0].set_ylabel("start")
    figure.savefig(path, dpi=120)


def draw_loss_over_offsets(curves: dict[str, LossMap], path: str | Path) -> None:
    """Draw the loss of the first document over the offset, one line per model.

    Args:
        curves: name of each line, and its losses on a grid with one start.
        path: path of the PNG.
    """
    lines = {}
    for name, losses in curves.items():
        _, offsets, grid = losses.of(0)
        lines[name] = offsets, grid[0].tolist()
    draw_lines(
        lines,
        path,
        "Loss of a document at each offset",
        "Mean loss of its tokens by the document's offset in the frame.",
        ("offset", "loss"),
    )


def draw_lines(
    curves: dict[str, tuple[list[float], list[float]]],
    path: str | Path,
    title: str,
    subtitle: str,
    axis_names: tuple[str, str],
) -> None:
    """Draw lines, each with its name at its end, as a PNG.

    Args:
        curves: name -> x and y of each line.
        path: path of the PNG.
        title, subtitle: text above the figure.
        axis_names: labels of x and y.
    """
    figure, (axes,) = new_figure(title, subtitle, height=3.6)
    ends = []
    for (x, y), color in zip(curves.values(), COLORS):
        axes.plot(x, y, color=color, linewidth=1.6, marker="o" if len(x) < 20 else None, ms=4)
        ends.append(y[-1])
    axes.set_xlim(x[0], x[-1])
    axes.set_ylim(bottom=0)
    label_ends(axes, np.array(ends), list(curves), COLORS)
    axes.set_xlabel(axis_names[0], color=MUTED)
    axes.set_ylabel(axis_names[1])
    figure.savefig(path, dpi=120)


def _edges(offsets: np.ndarray) -> np.ndarray:
    """Return the edges of cells around offsets."""
    if len(offsets) == 1:
        return np.array([offsets[0] - 0.5, offsets[0] + 0.5])
    middles = (offsets[1:] + offsets[:-1]) / 2
    return np.concatenate(
        [[2.0 * offsets[0] - middles[0]], middles, [2.0 * offsets[-1] - middles[-1]]]
    )
