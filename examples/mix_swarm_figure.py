# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The figure of ``13_mix_swarm.py``."""

import numpy as np

from energon_ext.cli.figure_style import COLORS, new_figure

#: Corners of the triangle in which a point is a mix of three sources.
CORNERS = np.array([[0, 0], [1, 0], [0.5, 3**0.5 / 2]])


def draw(path, names, shares, losses, held_out, surface, chosen):
    """Draw how well losses are predicted, and the mean loss over all mixes.

    Args:
        names: the three sources.
        shares, losses: of the mixes of the swarm, float64 [mixes, 3].
        held_out: losses of each mix as predicted from the others.
        surface: mixes and their predicted mean losses.
        chosen: further mixes by name.
    """
    figure, (left, right) = new_figure(
        "Losses of a swarm of small models, and what they predict for all mixes",
        "left: loss of each mix on unseen text, against its prediction from the other mixes · "
        "right: predicted mean loss of the sources",
        height=5.2,
        columns=2,
    )
    place = left.get_position()
    left.set_position([place.x0, 0.12, place.width, place.y1 - 0.12])  # room for the label
    for number, (name, color) in enumerate(zip(names, COLORS)):
        left.plot(held_out[:, number], losses[:, number], "o", color=color, ms=4, label=name)
    low, high = min(losses.min(), held_out.min()), max(losses.max(), held_out.max())
    left.plot([low, high], [low, high], color="0.6", linewidth=1, zorder=0)
    left.set_xlabel("predicted (nats per byte)")
    left.set_ylabel("measured (nats per byte)")
    left.legend(frameon=False, loc="upper left", fontsize=9)
    _draw_triangle(right, names, shares, surface, chosen)
    figure.savefig(path, dpi=120)


def _draw_triangle(axes, names, shares, surface, chosen):
    """Draw the mean loss over all mixes, and the mixes of the swarm and the chosen ones."""
    grid, values = surface
    x, y = (grid @ CORNERS).T
    axes.tricontourf(x, y, values, levels=24, cmap="viridis_r", alpha=0.8)
    lines = axes.tricontour(x, y, values, levels=8, colors="white", linewidths=0.8)
    axes.clabel(lines, fmt="%.2f", fontsize=8)
    axes.plot(*(shares @ CORNERS).T, "o", color="white", mec="black", ms=5, label="swarm")
    for (name, mix), marker in zip(chosen.items(), "*s"):
        label = name.replace("-", " ")
        axes.plot(*(mix @ CORNERS), marker, color=COLORS[1], mec="black", ms=11, label=label)
    for name, (x, y), place in zip(names, CORNERS, ("top", "top", "bottom")):
        shift = -6 if place == "top" else 6
        options = {"textcoords": "offset points", "ha": "center", "va": place, "fontsize": 9}
        axes.annotate(f"only {name}", (x, y), (0, shift), **options)
    axes.legend(frameon=False, loc="upper right", fontsize=9)
    axes.set_xlim(-0.15, 1.15)
    axes.set_aspect("equal")
    axes.set_axis_off()
