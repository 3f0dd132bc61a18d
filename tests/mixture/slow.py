# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Interleaves as sums in plain Python: what each member should have got, row after row."""

import hashlib
import json

import numpy as np

from energon_ext.mixture.mixture import Mixture
from energon_ext.mixture.tree import INTERLEAVE, blend_of
from energon_ext.weights import weight_from_config


def interleave(configs, row_tokens=1, **options):
    """A mixture of one interleave over ``s000``, ``s001``, ...; its weights as specs."""
    specs = {f"s{n:03d}": weight_from_config(config) for n, config in enumerate(configs)}
    tree = blend_of(specs, INTERLEAVE, **options)
    return Mixture(tree, list(specs), seed="0", row_tokens=row_tokens), list(specs.values())


def places_of_equals(count, seed="0"):
    """The place of each of some members in the order by which a seed decides between equals."""

    def number(member):
        digest = hashlib.blake2b(f"{seed}/{member}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1

    order = sorted(range(count), key=number)
    return [order.index(member) for member in range(count)]


def saved(drawing):
    """The state of a mixture, or of one interleave, through JSON."""
    if isinstance(drawing, Mixture):
        return json.loads(json.dumps(drawing.credits_to_json(drawing.credits())))
    return json.loads(json.dumps(drawing.to_json(drawing.now())))


def deviations(configs, *, steps, rows, length=None):
    """How far each member is ahead of the integral of its scheduled share, after every row.

    Args:
        configs: weights as in YAML.
        rows: of a step.
        length: of a row by member; 1 for all where it is None. Rows are then drawn one at a time,
            as a plan does whose rows are known only when they are read.

    Yields:
        ``(step, ahead)``, tokens by member.
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
    """Member and tokens of each row of a step."""
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
