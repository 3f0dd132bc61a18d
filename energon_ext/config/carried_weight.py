# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The tree of a metadataset, carried through Energon's list of loaded datasets.

A metadataset may return a list of ``LoadedDataset``s with a float each, and nothing else. So the
float of every source carries the whole tree and its own leaf. Stock metadatasets around one of ours
multiply and divide it, which changes a constant factor. Nothing else reads these weights:
:func:`parts_of` has the trees back.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Iterator, NamedTuple, Sequence

from megatron.energon.metadataset.loader_interface import LoadedDataset

from energon_ext.config.leaf import Leaf
from energon_ext.config.run_fields import RunFields
from energon_ext.errors import ConfigError
from energon_ext.mixture.tree import BLEND, Node, Tree
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


class CarriedWeight(float):
    """The share that stock Energon would make of the constant weights, with the tree behind it."""

    whole: Whole
    leaf: Leaf
    factor: float | None  # of stock metadatasets around ours, None where there is none

    def __new__(cls, whole: Whole, leaf: Leaf, factor: float | None = None) -> CarriedWeight:
        share = whole.shares[id(leaf)]
        self = super().__new__(cls, share if factor is None else share * factor)
        self.whole, self.leaf, self.factor = whole, leaf, factor
        return self

    def __mul__(self, factor: Any) -> CarriedWeight:
        before = 1.0 if self.factor is None else self.factor
        return CarriedWeight(self.whole, self.leaf, before * float(factor))

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> CarriedWeight:
        return self * (1.0 / float(divisor))

    def __float__(self) -> float:
        if self.whole.not_constant is not None:
            raise ConfigError(
                f"{self.whole.not_constant}: a schedule, a weight of 0 or an interleave, which "
                f"this TaskEncoder does not know; put energon_ext.DynamicBlendMixin first among "
                f"its base classes, or use energon_ext.PackedTaskEncoder."
            )
        return float.__add__(self, 0.0)


@dataclass(kw_only=True)
class UnweightedDataset(LoadedDataset):
    """Carries one leaf where Energon insists on a weight of None."""

    whole: Whole


class Part(NamedTuple):
    """Datasets of one tree, or a dataset of a stock metadataset, with the factor around them."""

    whole: Whole
    factor: float | None
    leaves: list[Leaf]
    datasets: list[LoadedDataset]


def carry(
    whole: Whole, datasets: Sequence[LoadedDataset], factor: float | None, *, weighted: bool
) -> list[LoadedDataset]:
    """The datasets of all leaves of a tree, in the same order, with what they carry."""
    pairs = list(zip(whole.leaves(), datasets, strict=True))
    if not weighted:
        return [
            UnweightedDataset(
                dataset=each.dataset, repetitions=each.repetitions, aux=each.aux, whole=whole
            )
            for _, each in pairs
        ]
    for leaf, each in pairs:
        each.weight = CarriedWeight(whole, leaf, factor)
    return list(datasets)


def parts_of(datasets: Sequence[LoadedDataset]) -> list[Part]:
    """What some loaded datasets carry, tree by tree; a dataset that carries nothing is a leaf."""
    parts: dict[int, Part] = {}
    for each in datasets:
        weight = each.weight
        if isinstance(weight, CarriedWeight):
            whole, leaf, factor = weight.whole, weight.leaf, weight.factor
        else:
            own = each.whole if isinstance(each, UnweightedDataset) else None
            whole = own or Whole(Leaf(dataset=each.dataset))
            leaf, factor = whole.leaves()[0], None if weight is None else float(weight)
        if each.repetitions is not None:
            factor = float(len(each.dataset) * each.repetitions)
        part = parts.setdefault(id(whole), Part(whole, factor, [], []))
        part.leaves.append(leaf)
        part.datasets.append(each)
    return list(parts.values())


def tree_of(parts: Sequence[Part]) -> Tree | Leaf:
    """Some parts as one tree: a constant blend of them where they are several."""
    trees = [part.whole.tree for part in parts]
    if len(parts) == 1 and (parts[0].factor is None or isinstance(trees[0], Leaf)):
        return trees[0]
    factors = [ConstantWeight(1.0 if part.factor is None else part.factor) for part in parts]
    return Tree(Node(BLEND, factors), trees)


def _shares(member: Tree | Leaf, above: float) -> Iterator[tuple[int, float]]:
    if isinstance(member, Leaf):
        yield id(member), above
        return
    for each, share in zip(member.members, member.node.shares_at_start):
        yield from _shares(each, above * share)
