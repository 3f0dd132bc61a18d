# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Errors and warnings about a mixture before the run starts.

All weights are known in advance, so a gap at step 40 000 is found at step 0. A mixture that cannot
work raises an error; one that works but is probably a mistake gives a :class:`BlendWarning`.
"""

import inspect
import re
import warnings
from typing import Any, Collection, Iterator, Mapping

import numpy as np

from energon_ext.errors import ConfigError
from energon_ext.mixture.mixture import Mixture
from energon_ext.mixture.tree import Tree
from energon_ext.weights import ScheduleAxis

#: A constant whose share a schedule pushes below this fraction of the largest share was probably
#: written on a different scale from the schedule.
DROWNED_SHARE = 1e-3

#: Most sources that one warning names; the others are counted.
MAX_NAMED = 3


class BlendWarning(UserWarning):
    """A blend that works but is probably not what the user meant."""


def check_mixture(
    tree: Tree,
    axis: ScheduleAxis,
    max_epochs: Mapping[str, int | None],
    absent: Mapping[str, Collection[str]],
    splices: Mapping[str, Any],
    end: int | None = None,
) -> None:
    """Raise ConfigError if nothing can be drawn from a mixture; warn if it looks like a mistake.

    Args:
        max_epochs: epoch limit of each source, or None.
        absent: worker -> sources of which it has no sample; only workers that lack some.
        splices: splice of each spliced source; one dataset with two splices is no mistake.
        end: position at which the run ends; None if unknown.

    Raises:
        ConfigError: all weights are 0 at some position.
    """
    keys = sorted(tree.keys())
    _check_never_all_zero(tree, keys, axis, absent)
    for message in (
        *_never_reached(tree, axis, end),
        *_drowned(tree, keys),
        *_listed_twice(keys, splices),
        *_nothing_after_limits(tree, keys, axis, max_epochs),
    ):
        warnings.warn(message, BlendWarning, stacklevel=_level_of_user())


def _level_of_user() -> int:
    """Return the ``stacklevel`` with which the caller's warning shows the user's own line."""
    level, frame = 1, inspect.currentframe()
    frame = None if frame is None else frame.f_back  # of the function that warns
    while frame is not None and _is_library(frame.f_globals.get("__name__", "")):
        level, frame = level + 1, frame.f_back
    return level


def _is_library(module: str) -> bool:
    return module.startswith(("energon_ext.", "megatron.", "contextlib"))


def _check_never_all_zero(
    tree: Tree, keys: list[str], axis: ScheduleAxis, absent: Mapping[str, Collection[str]]
) -> None:
    for worker, missing in {"": (), **absent}.items():
        position = _first_empty(tree, keys, missing)
        if position is None:
            continue
        present = [key for key in keys if key not in missing]
        who = f" for {worker}, which only has samples of {present}" if worker else ""
        weights = ", ".join(repr(weight) for node in tree.nodes() for weight in node.weights)
        raise ConfigError(
            f"Every weight is 0 at {axis.one} {position}{who}: {weights} for {', '.join(keys)}. "
            f"Give one of them a weight > 0 there{', or use fewer workers' * bool(worker)}."
        )


def _first_empty(tree: Tree, keys: list[str], missing: Collection[str]) -> int | None:
    """Return the first position at which only missing sources have a weight, or None."""
    mixture = Mixture(tree, keys, seed="")
    mixture.ended[:] = [key in missing for key in keys]
    return next((p for p in _decisive_positions(tree) if not mixture.open(p)), None)


def _never_reached(tree: Tree, axis: ScheduleAxis, end: int | None) -> Iterator[str]:
    for node in tree.nodes():
        for weight, where in zip(node.weights, node.wheres):
            last = max(weight.breakpoints(), default=0)
            is_written = weight.is_scheduled and node.live is None
            if end is not None and is_written and last >= end:
                schedule = f"the schedule {weight!r} continues to {axis.one} {last}"
                yield f"{where}: {schedule}, but the run ends at {end}."


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
        others = f" and {len(drowned) - MAX_NAMED} others" if len(drowned) > MAX_NAMED else ""
        lowest = np.where(is_low, shares, 1.0)
        position = positions[int(lowest.min(1).argmin())]
        yield (
            f"{', '.join(drowned[:MAX_NAMED])}{others}: a constant weight that drops to "
            f"{lowest.min():.1e} of the blend at position {position}; is it on the same scale as "
            f"the scheduled weights?"
        )


def _keys_without_schedule(tree: Tree) -> set[str]:
    """Return the sources with only constant weights from the root down."""
    keys: set[str] = set()
    for member, weight in zip(tree.members, tree.node.weights):
        if not weight.is_scheduled:
            keys |= _keys_without_schedule(member) if isinstance(member, Tree) else {member}
    return keys


def _listed_twice(keys: list[str], splices: Mapping[str, Any]) -> Iterator[str]:
    listed = {key: (re.sub(r"#\d+$", "", key), splices.get(key)) for key in keys}
    for key, (path, _) in listed.items():
        if path != key and [*listed.values()].count(listed[key]) > 1:
            twice = "the same source is listed more than once"
            yield f"{key}: {twice}; each entry reads all of it, in its own order."


def _nothing_after_limits(
    tree: Tree, keys: list[str], axis: ScheduleAxis, max_epochs: Mapping[str, int | None]
) -> Iterator[str]:
    """Warn if sources without a limit have no weight somewhere; others may have ended by then."""
    limits = {key: limit for key, limit in max_epochs.items() if limit is not None}
    position = _first_empty(tree, keys, limits)
    if limits and len(limits) < len(keys) and position is not None:
        yield (
            f"At {axis.one} {position} only sources with a max_epochs have a weight > 0 "
            f"({limits}); if they have ended by then, the run fails. Give another source a weight "
            f"there, however small."
        )


def _decisive_positions(tree: Tree) -> list[int]:
    """Return the positions where a weight can become 0 or be smallest, see ``KINDS``."""
    points = {0, *tree.breakpoints()}
    return sorted(points | {point + 1 for point in points})
