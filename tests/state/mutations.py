# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""JSON states with one change: of a value, a type, a key or the length of a list."""

import copy
import json
import random


def mutations(state, count, seed):
    """Yield ``count`` changed copies of a state with a description; deterministic per seed."""
    chance = random.Random(seed)
    places = [place for place in places_of(state) if place]
    text = json.dumps(state, sort_keys=True)
    while count:
        *path, key = chance.choice(places)
        mutated = copy.deepcopy(state)
        parent = mutated
        for step in path:
            parent = parent[step]
        before, change = copy.deepcopy(parent[key]), chance.choice(CHANGES)
        change(parent, key, before, chance)
        if json.dumps(mutated, sort_keys=True) != text:
            count -= 1
            yield (
                f"{'.'.join(map(str, (*path, key)))}: {change.__name__} of {before!r:.60}",
                mutated,
            )


def change_value(parent, key, before, chance):
    """Change a value, but not its type."""
    if isinstance(before, bool):
        parent[key] = not before
    elif isinstance(before, int):
        others = [before + 1, before - 1, -before - 1, 10 * before + 7, 2**64]
        parent[key] = chance.choice(others)
    elif isinstance(before, float):
        parent[key] = chance.choice([before + 0.5, float("nan"), float("-inf"), -before - 1])
    elif isinstance(before, str):
        parent[key] = chance.choice([before + " ", before[1:] or "x", "", before.upper() + "'"])


def change_type(parent, key, before, chance):
    """Change the type of a value."""
    others = [None, str(before)[:50], [before], {"x": before}, [], {}, chance.random() < 0.5]
    if isinstance(before, int) and before < 2**60:
        others.append(float(before))
    if isinstance(before, list):
        others.append({str(n): value for n, value in enumerate(before)})
    if isinstance(before, dict):
        others += [list(before), list(before.values())]
    parent[key] = chance.choice(others)


def drop(parent, key, before, chance):
    """Remove a key or an element."""
    del parent[key]


def add(parent, key, before, chance):
    """Add a key or an element."""
    if isinstance(before, dict):
        parent[key][chance.choice(["new", "version ", "", "plan2"])] = before
    elif isinstance(before, list):
        parent[key].insert(chance.randrange(len(before) + 1), chance.choice([*before, 0]))


def shorten(parent, key, before, chance):
    """Truncate a list, a mapping or text."""
    if isinstance(before, dict):
        parent[key] = dict(list(before.items())[: chance.randrange(len(before) + 1)])
    elif isinstance(before, (list, str)):
        parent[key] = before[: chance.randrange(len(before) + 1)]


def exchange(parent, key, before, chance):
    """Swap two elements of a list."""
    if isinstance(before, list) and len(before) > 1:
        one, other = chance.sample(range(len(before)), 2)
        parent[key][one], parent[key][other] = before[other], before[one]


CHANGES = [change_value, change_value, change_type, drop, add, shorten, exchange]


def places_of(value, place=()):
    """Yield the path of everything in a state."""
    yield place
    if isinstance(value, dict):
        keys = list(value)
    elif isinstance(value, list):
        keys = range(min(len(value), 40))  # random generators have long lists
    else:
        return
    for key in keys:
        yield from places_of(value[key], (*place, key))
