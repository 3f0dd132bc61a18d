# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Errors and warnings about a mixture before the run starts.

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
#: probably written on a different scale from the schedule's.
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
        max_epochs: limit of each source, None where it has none.
        absent: worker -> sources of which it has no sample, where there is such a worker.
        splices: of sources that are spliced; one dataset with two is no mistake.
        end: position at which the run ends, None where nobody can tell.

    Raises:
        ConfigError: all weights are 0 somewhere; names the position, the worker, the weights.
    """
    keys = sorted(tree.keys())
    _check_never_all_zero(tree, keys, axis, absent)
    for message in (
        *_never_reached(tree, axis, end),
        *_drowned(tree, keys),
        *_listed_twice(keys, splices),
        *_nothing_after_limits(tree, keys, axis, max_epochs),
    ):
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
        weights = ", ".join(repr(weight) for node in tree.nodes() for weight in node.weights)
        raise ConfigError(
            f"Every weight is 0 at {axis.one} {position}{who}: {weights} for {', '.join(keys)}. "
            f"Give one of them a weight > 0 there{'; or use fewer workers' * bool(worker)}."
        )


def _first_empty(tree: Tree, keys: list[str], missing: Collection[str]) -> int | None:
    """The first position at which only missing sources have a weight."""
    mixture = Mixture(tree, keys, seed="")
    mixture.ended[:] = [key in missing for key in keys]
    return next((p for p in _decisive_positions(tree) if not mixture.open(p)), None)


def _never_reached(tree: Tree, axis: ScheduleAxis, end: int | None) -> Iterator[str]:
    for node in tree.nodes():
        for weight, where in zip(node.weights, node.wheres):
            last = max(weight.breakpoints(), default=0)
            is_written = weight.is_scheduled and node.live is None
            if end is not None and is_written and last >= end:
                goes_on = f"the schedule {weight!r} goes on to {axis.counted} {last}"
                yield f"{where}: {goes_on}, but the run ends at {end}."


def _drowned(tree: Tree, keys: list[str]) -> Iterator[str]:
    if not tree.breakpoints():
        return
    positions = _decisive_positions(tree)
    mixture = Mixture(tree, keys, seed="")
    shares = np.array([mixture.shares(position) for position in positions])
    is_low = (shares > 0) & (shares < DROWNED_SHARE * shares.max(1, keepdims=True))
    constant = _keys_without_schedule(tree)
    is_low &= [key in constant for key in keys]
    if is_low.any():
        drowned = [keys[number] for number in np.flatnonzero(is_low.any(0))]
        others = f" and {len(drowned) - MOST_NAMED} others" if len(drowned) > MOST_NAMED else ""
        lowest = np.where(is_low, shares, 1.0)
        position = positions[int(lowest.min(1).argmin())]
        yield (
            f"{', '.join(drowned[:MOST_NAMED])}{others}: a constant weight that is "
            f"{lowest.min():.1e} of the blend at position {position}; is it on the same scale as "
            f"the schedules beside it?"
        )


def _keys_without_schedule(tree: Tree) -> set[str]:
    """Sources on whose path every weight is a constant."""
    found: set[str] = set()
    for member, weight in zip(tree.members, tree.node.weights):
        if not weight.is_scheduled:
            found |= _keys_without_schedule(member) if isinstance(member, Tree) else {member}
    return found


def _listed_twice(keys: list[str], splices: Mapping[str, Any]) -> Iterator[str]:
    listed = {key: (re.sub(r"#\d+$", "", key), splices.get(key)) for key in keys}
    for key, (path, _) in listed.items():
        if path != key and [*listed.values()].count(listed[key]) > 1:
            each = "each reads all of it, in an order of its own"
            yield f"{key}: the same source is listed more than once; {each}."


def _nothing_after_limits(
    tree: Tree, keys: list[str], axis: ScheduleAxis, max_epochs: Mapping[str, int | None]
) -> Iterator[str]:
    """A source may reach its limit at any time, so the others must do without it at all times."""
    limits = {key: limit for key, limit in max_epochs.items() if limit is not None}
    position = _first_empty(tree, keys, limits)
    if limits and len(limits) < len(keys) and position is not None:
        yield (
            f"At {axis.one} {position} only sources with a max_epochs have a weight > 0 "
            f"({limits}); should they have ended by then, the run ends there with an error. Give "
            f"another source a weight, however small."
        )


def _decisive_positions(tree: Tree) -> list[int]:
    """Positions where a weight can become 0 or be smallest: between breakpoints it is monotone,
    and 0 everywhere or nowhere, by the rule of :data:`energon_ext.weights.schedule.KINDS`."""
    points = {0, *tree.breakpoints()}
    return sorted(points | {point + 1 for point in points})
