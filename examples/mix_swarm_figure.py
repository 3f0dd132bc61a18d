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
        "right: predicted mean loss of the three sources; each dot is a mix of the swarm",
        height=5.2,
        columns=2,
    )
    for number, (name, color) in enumerate(zip(names, COLORS)):
        left.plot(held_out[:, number], losses[:, number], "o", color=color, ms=4, label=name)
    low, high = min(losses.min(), held_out.min()), max(losses.max(), held_out.max())
    left.plot([low, high], [low, high], color="0.6", linewidth=1, zorder=0)
    left.set_xlabel("predicted (nats per byte)")
    left.set_ylabel("measured (nats per byte)")
    left.legend(frameon=False, loc="upper left")
    grid, values = surface
    contour = right.tricontourf(*(grid @ CORNERS).T, values, levels=12, cmap="viridis_r")
    figure.colorbar(contour, ax=right, shrink=0.75, label="predicted mean loss")
    right.plot(*(shares @ CORNERS).T, "o", color="white", mec="black", ms=5)
    for (name, mix), marker in zip(chosen.items(), "*s"):
        (x, y) = mix @ CORNERS
        right.plot(x, y, marker, color=COLORS[1], mec="black", ms=13 if marker == "*" else 7)
        right.annotate(name, (x, y), (8, 6), textcoords="offset points")
    for name, (x, y), place in zip(names, CORNERS, ("top", "top", "bottom")):
        shift = -8 if place == "top" else 8
        right.annotate(
            f"only {name}", (x, y), (0, shift), textcoords="offset points", ha="center", va=place
        )
    right.set_aspect("equal")
    right.set_axis_off()
    figure.savefig(path, dpi=120)
