# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Errors and warnings about a mixture before the run starts.

All weights are known in advance, so a gap at step 40 000 is found at step 0. A mixture that cannot
work raises an error; one that works but is probably a mistake gives a :class:`BlendWarning`.
"""

import inspect
import math
import re
import warnings
from collections import Counter
from typing import Any, Collection, Iterator, Mapping

from energon_ext.mixture.mixture import zero_weights_error
from energon_ext.mixture.tree import Tree
from energon_ext.weights import ScheduleAxis, WeightSpec
from energon_ext.weights.schedule import Weights

#: A constant below this fraction of the largest value of a schedule in the same node was probably
#: written on a different scale from the schedule.
DROWNED_SHARE = 1e-3

#: Most sources that one warning names; the others are counted.
MAX_NAMED = 3

#: The first position of a range, and the first one after it.
Range = tuple[float, float]


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
        *_find_unreached(tree, axis, end),
        *_find_drowned(tree),
        *_find_listed_twice(keys, splices),
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
        position = _first_empty(tree, missing)
        if position is None:
            continue
        present = [key for key in keys if key not in missing]
        who = f" for {worker}, which only has samples of {present}" if worker else ""
        weights = ", ".join(repr(weight) for node in tree.nodes() for weight in node.weights)
        whose = f"{who}: {weights} for {', '.join(keys)}"
        raise zero_weights_error(axis.one, position, whose, "use fewer workers" * bool(worker))


def _first_empty(tree: Tree, missing: Collection[str]) -> int | None:
    """Return the first position at which only missing sources have a weight, or None."""
    ranges = _empty_ranges(tree, missing)
    return int(ranges[0][0]) if ranges else None


def _empty_ranges(tree: Tree, missing: Collection[str]) -> list[Range]:
    """Return the ranges of positions at which only missing sources have a weight."""
    of_members = []
    for member, weight in zip(tree.members, tree.node.weights):
        inside = _empty_ranges(member, missing) if isinstance(member, Tree) else []
        if not isinstance(member, Tree) and member in missing:
            inside = [(0, math.inf)]
        of_members += _find_covered([*inside, *_zero_ranges(weight)], times=1)
    return _find_covered(of_members, times=len(tree.members))


def _zero_ranges(weight: WeightSpec) -> list[Range]:
    """Return the ranges of positions at which a weight is 0."""
    points, values = _decisive_values(weight)
    stops = [*points[1:], math.inf]
    return [(first, stop) for first, stop, value in zip(points, stops, values) if not value]


def _find_covered(ranges: Collection[Range], times: int) -> list[Range]:
    """Return the parts of a line that at least ``times`` of some ranges cover, in order."""
    changes = Counter(first for first, _ in ranges)
    changes.subtract(stop for _, stop in ranges)
    covered, begin, count = [], None, 0
    for position in sorted(changes):
        count += changes[position]
        if count >= times and begin is None:
            begin = position
        elif count < times and begin is not None:
            covered.append((begin, position))
            begin = None
    return covered


def _find_unreached(tree: Tree, axis: ScheduleAxis, end: int | None) -> Iterator[str]:
    for node in tree.nodes():
        for weight, where in zip(node.weights, node.wheres):
            is_written = weight.is_scheduled and node.live is None
            if end is not None and is_written and (points := weight.unreached(end)):
                schedule = f"the schedule {weight!r} continues to {axis.one} {max(points)}"
                yield f"{where}: {schedule}, but the run ends at {end}."


def _find_drowned(tree: Tree) -> Iterator[str]:
    """Warn about constants next to a much larger schedule, in one message for the whole tree."""
    names: list[str] = []
    shares = []
    for each in _trees(tree):
        weights = each.node.weights
        peaks = [_peak(weight) for weight in weights if weight.is_scheduled]
        if not peaks:
            continue
        largest, position = max(peaks, key=lambda peak: peak[0])
        values = Weights(weights).at(position)
        for member, weight, value in zip(each.members, weights, values.tolist()):
            if not weight.is_scheduled and 0 < value < DROWNED_SHARE * largest:
                names += member.keys() if isinstance(member, Tree) else [member]
                shares.append((value / values.sum(), position))
    if names:
        names = sorted(set(names))
        others = f" and {len(names) - MAX_NAMED} others" if len(names) > MAX_NAMED else ""
        lowest, position = min(shares)
        yield (
            f"{', '.join(names[:MAX_NAMED])}{others}: a constant weight that drops to {lowest:.1e} "
            f"of the blend at position {position}; is it on the same scale as the scheduled "
            f"weights?"
        )


def _trees(tree: Tree) -> Iterator[Tree]:
    """Yield a tree and all trees below."""
    yield tree
    for member in tree.members:
        if isinstance(member, Tree):
            yield from _trees(member)


def _peak(weight: WeightSpec) -> tuple[float, int]:
    """Return the largest value of a weight, and the first position at which it has this value."""
    points, values = _decisive_values(weight)
    largest = max(values)
    return largest, points[values.index(largest)]


def _find_listed_twice(keys: list[str], splices: Mapping[str, Any]) -> Iterator[str]:
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
    position = _first_empty(tree, limits)
    if limits and len(limits) < len(keys) and position is not None:
        yield (
            f"At {axis.one} {position} only sources with a max_epochs have a weight > 0 "
            f"({limits}); if they have ended by then, the run fails. Give another source a weight "
            f"there, however small."
        )


def _decisive_values(weight: WeightSpec) -> tuple[list[int], list[float]]:
    """Return the positions where a weight can become 0, smallest or largest, and its values there.

    Between two of them it is monotone, and 0 everywhere or nowhere, see ``KINDS``.
    """
    breakpoints = weight.breakpoints()
    points = sorted({0, *breakpoints, *(point + 1 for point in breakpoints)})
    alone = Weights([weight])
    return points, [float(alone.at(point)[0]) for point in points]
