# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""States with one thing changed: a value, a type, a key, the length of a list."""

import copy
import dataclasses
import math
import random
from collections.abc import Mapping

import numpy as np
import torch


def mutations(state, count, seed):
    """``count`` copies of a state, each with one change; the same for the same seed.

    Yields:
        (what was changed, as text; the copy)
    """
    chance = random.Random(seed)
    places = [place for place in _places(state) if place]
    while count:
        place = chance.choice(places)
        mutated = copy.deepcopy(state)
        parent = _at(mutated, place[:-1])
        before = _get(parent, place[-1])
        change = chance.choice(CHANGES)
        if change(parent, place[-1], before, chance):
            count -= 1
            yield f"{'.'.join(map(str, place))}: {change.__name__} of {before!r:.60}", mutated


def change_value(parent, key, before, chance):
    """Another value of the same type."""
    if isinstance(before, bool):
        after = not before
    elif isinstance(before, int):
        after = chance.choice([before + 1, before - 1, -before - 1, 10 * before + 7, 2**64])
    elif isinstance(before, float):
        after = chance.choice([math.nextafter(before, math.inf), math.nan, -math.inf, -before - 1])
    elif isinstance(before, str):
        after = chance.choice([before + " ", before[1:] or "x", "", before.upper() + "'"])
    elif isinstance(before, bytes):
        after = before + b"\0"
    elif before is None:
        after = chance.choice([0, 1, "", []])
    elif isinstance(before, (torch.Tensor, np.ndarray)) and len(before):
        after = before.copy() if isinstance(before, np.ndarray) else before.clone()
        after[chance.randrange(len(after))] += 1
    else:
        return False
    return _set(parent, key, after, before)


def change_type(parent, key, before, chance):
    """Another type, of the same value where that can be."""
    others = [None, str(before)[:50], [before], {"x": before}, (before,), chance.random() < 0.5]
    if isinstance(before, (int, str)):
        others += [float(before)] if isinstance(before, int) and before < 2**60 else []
        others += [str(before).encode(), [], {}]
    elif isinstance(before, list):
        others += [tuple(before), dict(enumerate(before))]
    elif isinstance(before, tuple):
        others += [list(before)]
    elif isinstance(before, Mapping):
        others += [list(before), list(before.values()), list(before.items())]
    elif isinstance(before, (torch.Tensor, np.ndarray)):
        others += [before.tolist(), np.asarray(before).astype("float64")]
    return _set(parent, key, chance.choice(others), before)


def drop(parent, key, before, chance):
    """A key or an element less."""
    if isinstance(parent, (dict, list)):
        del parent[key]
        return True
    return isinstance(parent, tuple) is False and _set(parent, key, None, before)


def add(parent, key, before, chance):
    """A key or an element more."""
    if isinstance(before, dict):
        before[chance.choice(["new", "version ", "", "plan2"])] = copy.deepcopy(before)
    elif isinstance(before, list):
        before.insert(chance.randrange(len(before) + 1), copy.deepcopy(chance.choice([*before, 0])))
    else:
        return False
    return True


def shorten(parent, key, before, chance):
    """Only the beginning of a list, a mapping or a text."""
    if not isinstance(before, (list, tuple, dict, str, bytes)) or not before:
        return False
    kept = chance.randrange(len(before))
    if isinstance(before, dict):
        return _set(parent, key, type(before)(list(before.items())[:kept]), before)
    return _set(parent, key, before[:kept], before)


def exchange(parent, key, before, chance):
    """Two elements of a list in each other's place."""
    if not isinstance(before, list) or len(before) < 2:
        return False
    one, other = chance.sample(range(len(before)), 2)
    if before[one] is before[other] or repr(before[one]) == repr(before[other]):
        return False
    before[one], before[other] = before[other], before[one]
    return True


CHANGES = [change_value, change_value, change_type, drop, add, shorten, exchange]


def _places(value, place=()):
    """Where everything in a state is."""
    yield place
    if isinstance(value, Mapping):
        keys = list(value)
    elif isinstance(value, (list, tuple)):
        keys = range(min(len(value), 40))  # of the long lists of random generators the beginning
    elif dataclasses.is_dataclass(value):
        keys = [field.name for field in dataclasses.fields(value)]
    else:
        return
    for key in keys:
        yield from _places(_get(value, key), (*place, key))


def _at(state, place):
    for key in place:
        state = _get(state, key)
    return state


def _get(parent, key):
    return getattr(parent, key) if dataclasses.is_dataclass(parent) else parent[key]


def _set(parent, key, value, before):
    if type(value) is type(before) and repr(value) == repr(before):
        return False
    if isinstance(parent, tuple):
        return False
    if dataclasses.is_dataclass(parent):
        setattr(parent, key, value)
    else:
        parent[key] = value
    return True
