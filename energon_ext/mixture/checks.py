# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""What is wrong, or looks wrong, with a mixture before the run starts.

The weights are known for all time, so a gap at step 40 000 is found at step 0. What cannot work is
an error; what works, but is rarely meant, is a :class:`BlendWarning`.
"""

import re
import warnings
from typing import Any, Collection, Iterator, Mapping

import numpy as np

from energon_ext.errors import ConfigError
from energon_ext.mixture.mixture import Mixture
from energon_ext.mixture.tree import Tree
from energon_ext.weights import ScheduleAxis

#: A constant whose share falls below this part of the largest share because of a schedule was
#: probably written on another scale than the schedule.
DROWNED_SHARE = 1e-3

#: Sources of one warning that are named; the others are counted.
MOST_NAMED = 3


class BlendWarning(UserWarning):
    """A blend that works and is probably not what was meant."""


def check_mixture(
    tree: Tree,
    axis: ScheduleAxis,
    max_epochs: Mapping[str, int | None],
    absent: Mapping[str, Collection[str]],
    splices: Mapping[str, Any],
    end: int | None = None,
) -> None:
    """Refuse a mixture that cannot be drawn from, and warn of one that looks wrong.

    Args:
        tree: of the whole metadataset.
        axis: what the breakpoints in the YAML count.
        max_epochs: limit of each source, None where it has none.
        absent: worker -> sources of which it has no sample, where there is such a worker.
        splices: of sources that are spliced; one dataset with two is no mistake.
        end: position at which the run ends, None where nobody can tell.

    Raises:
        ConfigError: all weights are 0 somewhere; names the position, the worker, the weights.
    """
    keys = sorted(tree.keys())
    shown = {key: (re.sub(r"#\d+$", "", key), splices.get(key)) for key in keys}
    _check_never_all_zero(tree, keys, axis, absent)
    messages = [
        *_never_reached(tree, axis, end),
        *_drowned(tree, keys),
        *(
            f"{key}: the same source is listed more than once; each reads all of it, in an order "
            f"of its own."
            for key in keys
            if shown[key][0] != key and [*shown.values()].count(shown[key]) > 1
        ),
        *_nothing_after_limits(tree, keys, axis, max_epochs),
    ]
    for message in messages:
        warnings.warn(message, BlendWarning, stacklevel=2)


def _check_never_all_zero(
    tree: Tree, keys: list[str], axis: ScheduleAxis, absent: Mapping[str, Collection[str]]
) -> None:
    for worker, missing in {"": (), **absent}.items():
        position = _first_empty(tree, keys, missing)
        if position is None:
            continue
        present = [key for key in keys if key not in missing]
        who = f" for {worker}, which has samples of {present} only" if worker else ""
        weights = [repr(weight) for node in tree.nodes() for weight in node.weights]
        raise ConfigError(
            f"Every weight is 0 at {axis.one} {position}{who}: {', '.join(weights)} for "
            f"{', '.join(keys)}. Give one of them a weight > 0 there"
            + ("; or use fewer workers." if worker else ".")
        )


def _first_empty(tree: Tree, keys: list[str], missing: Collection[str]) -> int | None:
    mixture = Mixture(tree, keys, seed="")
    mixture.ended = np.array([key in missing for key in keys])
    return next((p for p in _decisive_positions(tree) if not mixture.open(p)), None)


def _never_reached(tree: Tree, axis: ScheduleAxis, end: int | None) -> Iterator[str]:
    if end is None:
        return
    for node in tree.nodes():
        for weight, where in zip(node.weights, node.wheres):
            late = [point for point in weight.breakpoints() if point >= end]
            if late:
                yield (
                    f"{where}: the schedule {weight!r} goes on to {axis.counted} {late[-1]}, but "
                    f"the run ends at {end}."
                )


def _drowned(tree: Tree, keys: list[str]) -> Iterator[str]:
    if not any(weight.is_scheduled for node in tree.nodes() for weight in node.weights):
        return
    constant = _keys_without_schedule(tree)
    drowned: dict[str, tuple[float, int]] = {}
    mixture = Mixture(tree, keys, seed="")
    for position in _decisive_positions(tree):
        shares = mixture.shares(position).tolist()
        least = DROWNED_SHARE * max(shares)
        for key, share in zip(keys, shares):
            if key in constant and 0 < share < least:
                drowned[key] = min(drowned.get(key, (1.0, 0)), (share, position))
    if drowned:
        named = ", ".join(list(drowned)[:MOST_NAMED])
        others = f" and {len(drowned) - MOST_NAMED} others" if len(drowned) > MOST_NAMED else ""
        share, position = min(drowned.values())
        yield (
            f"{named}{others}: a constant weight that is {share:.1e} of the blend at position "
            f"{position}; is it on the same scale as the schedules beside it?"
        )


def _keys_without_schedule(tree: Tree) -> set[str]:
    """Sources on whose path every weight is a constant."""
    found: set[str] = set()
    for member, weight in zip(tree.members, tree.node.weights):
        if not weight.is_scheduled:
            found |= _keys_without_schedule(member) if isinstance(member, Tree) else {member}
    return found


def _nothing_after_limits(
    tree: Tree, keys: list[str], axis: ScheduleAxis, max_epochs: Mapping[str, int | None]
) -> Iterator[str]:
    """A source may reach its limit at any time, so the others must do without it at all times."""
    limits = {key: limit for key, limit in max_epochs.items() if limit is not None}
    if not limits or len(limits) == len(keys):
        return
    position = _first_empty(tree, keys, limits)
    if position is not None:
        yield (
            f"At {axis.one} {position} only sources with a max_epochs have a weight > 0 "
            f"({limits}); should they have ended by then, the run ends there with an error. Give "
            f"another source a weight, however small."
        )


def _decisive_positions(tree: Tree) -> list[int]:
    """Where a weight can become 0 or be smallest: between two breakpoints it is monotone, and 0
    everywhere or nowhere, by the rule of :data:`energon_ext.weights.schedule.KINDS`."""
    points = {0, *tree.breakpoints()}
    return sorted(points | {point + 1 for point in points})
