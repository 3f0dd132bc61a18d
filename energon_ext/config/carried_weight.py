# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The tree of a metadataset, carried through Energon's list of loaded datasets.

A metadataset returns datasets with a float each. So this float carries the whole tree, and the leaf
of its source. Stock metadatasets around one of ours multiply and divide it, which changes a factor.
:func:`parts_of` has the trees back; nothing else reads these weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Sequence

from megatron.energon.metadataset.loader_interface import LoadedDataset

from energon_ext.config.leaf import Leaf
from energon_ext.config.whole import Whole
from energon_ext.errors import ConfigError
from energon_ext.mixture.tree import BLEND, Node, Tree
from energon_ext.weights import ConstantWeight


class CarriedWeight(float):
    """The share that stock Energon would make of the constant weights, with the tree behind it."""

    whole: Whole
    leaf: Leaf
    factor: float | None  # of stock metadatasets around ours, None where there is none

    def __new__(cls, whole: Whole, leaf: Leaf, factor: float | None) -> CarriedWeight:
        self = super().__new__(cls, whole.shares[id(leaf)] * (1.0 if factor is None else factor))
        self.whole, self.leaf, self.factor = whole, leaf, factor
        return self

    def __mul__(self, factor: Any) -> CarriedWeight:
        before = 1.0 if self.factor is None else self.factor
        return CarriedWeight(self.whole, self.leaf, before * float(factor))

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> CarriedWeight:
        before = 1.0 if self.factor is None else self.factor
        return CarriedWeight(self.whole, self.leaf, before / float(divisor))

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
    carried = []
    for leaf, each in zip(whole.leaves(), datasets, strict=True):
        if weighted:
            each.weight = CarriedWeight(whole, leaf, factor)
        else:
            fields = {"repetitions": each.repetitions, "aux": each.aux}
            each = UnweightedDataset(dataset=each.dataset, whole=whole, **fields)
        carried.append(each)
    return carried


def parts_of(datasets: Sequence[LoadedDataset]) -> list[Part]:
    """What some loaded datasets carry, tree by tree; a dataset that carries nothing is a leaf."""
    parts: dict[int, Part] = {}
    for each in datasets:
        weight = each.weight
        if isinstance(weight, CarriedWeight):
            whole, leaf, factor = weight.whole, weight.leaf, weight.factor
        else:
            whole = getattr(each, "whole", None) or Whole(Leaf(dataset=each.dataset))
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
