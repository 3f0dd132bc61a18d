# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Slow references for mixtures: sums in plain Python, row by row."""

import hashlib
import json

import numpy as np

from energon_ext.mixture.mixture import Mixture
from energon_ext.mixture.tree import INTERLEAVE, blend_of
from energon_ext.weights import weight_from_config


def interleave(configs, row_tokens=1, **options):
    """Return a mixture of one interleave over ``s000``, ``s001``, ... and its weights."""
    specs = {f"s{n:03d}": weight_from_config(config) for n, config in enumerate(configs)}
    tree = blend_of(specs, INTERLEAVE, **options)
    return Mixture(tree, list(specs), seed="0", row_tokens=row_tokens), list(specs.values())


def places_of_equals(count, seed="0"):
    """Return each member's position in the order that breaks ties, which depends on the seed."""

    def number(member):
        digest = hashlib.blake2b(f"{seed}/{member}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1

    order = sorted(range(count), key=number)
    return [order.index(member) for member in range(count)]


def uniform(key, number):
    """Return the ``number``-th random number of a node of a mixture."""
    words = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=16).digest(), "little")
    block, place = divmod(number, 4096)
    raw = np.random.Philox(key=words, counter=block << 64).random_raw(place + 1)[-1]
    return (int(raw) >> 11) / 2**53


def saved(drawing):
    """Return the state of a mixture, or of one interleave, after a round trip through JSON."""
    if isinstance(drawing, Mixture):
        return json.loads(json.dumps(drawing.credits_to_json(drawing.credits())))
    return json.loads(json.dumps(drawing.to_json(drawing.now())))


def deviations(configs, *, steps, rows, length=None):
    """Compare each member with the integral of its scheduled share, after every row.

    Args:
        configs: Weights as in YAML.
        rows: Rows per step.
        length: Tokens of a row by member; None if every row is 1. With lengths, rows are drawn one
            at a time, as if they were known only when they are read.

    Yields:
        ``(step, ahead)``: how many tokens each member is ahead.
    """
    mixture, specs = interleave(configs, row_tokens=1 if length is None else 0)
    due, got = [0.0] * len(specs), [0] * len(specs)
    for step in range(steps):
        values = [spec.evaluate(step) for spec in specs]
        total = sum(values)
        shares = [value / total for value in values]
        for member, tokens in _drawn(mixture, step, rows, length):
            got[member] += tokens
            due = [each + share * tokens for each, share in zip(due, shares)]
            yield step, [have - should for have, should in zip(got, due)]


def _drawn(mixture, step, rows, length):
    """Yield the member and the tokens of each row of a step."""
    is_open = mixture.open(step)
    assert is_open
    numbers = np.arange(step * rows, (step + 1) * rows)
    if length is None:
        members = mixture.draw(numbers).tolist()
        mixture.settle(np.bincount(members, minlength=len(mixture.keys)))
        yield from ((member, 1) for member in members)
        return
    for number in numbers:
        (member,) = mixture.draw(np.array([number])).tolist()
        tokens = np.zeros(len(mixture.keys), np.int64)
        tokens[member] = length(member)
        mixture.settle(tokens)
        yield member, int(tokens[member])
