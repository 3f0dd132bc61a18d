# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""What a metadataset hands over: its tree, with datasets as leaves, and its fields for the run."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Callable, Iterator, Sequence

from energon_ext.config.leaf import Leaf
from energon_ext.config.run_fields import RunFields
from energon_ext.mixture.tree import BLEND, Tree
from energon_ext.weights import ConstantWeight


@dataclass(frozen=True, eq=False)
class Whole:
    """A tree over leaves, or one leaf, and what its metadatasets say for the whole run."""

    tree: Tree | Leaf
    run: Sequence[RunFields] = ()

    def leaves(self) -> list[Leaf]:
        """In the order of the YAML."""
        return [self.tree] if isinstance(self.tree, Leaf) else list(self.tree.keys())

    @functools.cached_property
    def shares(self) -> dict[int, float]:
        """The share of each leaf at position 0, by its ``id``."""
        return dict(_shares(self.tree, 1.0))

    @functools.cached_property
    def not_constant(self) -> str | None:
        """The place of a weight by which stock Energon cannot draw, None where there is none."""
        for node in () if isinstance(self.tree, Leaf) else self.tree.nodes():
            for weight, where in zip(node.weights, node.wheres or [""] * len(node.weights)):
                is_constant = isinstance(weight, ConstantWeight) and weight.value > 0
                if not is_constant or node.rule != BLEND:
                    return where
        return None


def map_leaves(tree: Tree | Leaf, change: Callable[[Leaf], Leaf]) -> Tree | Leaf:
    """A tree, or a leaf alone, with every leaf changed."""
    if isinstance(tree, Leaf):
        return change(tree)
    changed = tree.map(change)
    assert changed is not None, "a tree of a metadataset has leaves"
    return changed


def _shares(member: Tree | Leaf, above: float) -> Iterator[tuple[int, float]]:
    if isinstance(member, Leaf):
        yield id(member), above
        return
    for each, share in zip(member.members, member.node.shares_at_start):
        yield from _shares(each, above * share)
