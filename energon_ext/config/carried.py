# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The leaves of a metadataset, and its tree, carried through Energon's list of loaded datasets.

A metadataset returns datasets with a float each, which stock metadatasets around one of ours
multiply and divide. So each dataset carries its leaf and the whole tree, and its float the factor
that is around the tree. :func:`parts_of` has the trees back. A TaskEncoder without our mixin takes
the float for a constant weight, and refuses schedules and interleaves.
"""

from dataclasses import dataclass
from typing import Any, Callable, Iterable, NamedTuple, Sequence

from megatron.energon.epathlib import EPath
from megatron.energon.flavors.base_dataset import BaseCoreDatasetFactory
from megatron.energon.metadataset.loader_interface import LoadedDataset

from energon_ext.config.run_fields import RunFields
from energon_ext.errors import ConfigError
from energon_ext.mixture.mixture import Mixture
from energon_ext.mixture.tree import BLEND, Node, Tree
from energon_ext.splice.config import SpliceFields
from energon_ext.weights import ConstantWeight


@dataclass(frozen=True, kw_only=True, eq=False)
class Leaf:
    """A source of a metadataset."""

    dataset: BaseCoreDatasetFactory  # Energon's
    where: str = ""  # place in the YAML, for messages; empty without a YAML
    max_epochs: int | None = None  # most passes over the source in a run, None for no limit
    name: str | None = None  # display name of the source, None for its key
    splice: SpliceFields | None = None  # how its documents are shown, None for in rows
    splice_where: str = ""  # place of that in the YAML
    metadataset: EPath | None = None  # the outermost one; None without one of ours
    run: RunFields | None = None  # what its metadatasets say for the whole run

    @property
    def root(self) -> EPath | None:
        """The folder to which the key is relative; it is absolute for None."""
        return None if self.metadataset is None else self.metadataset.parent

    @property
    def subflavors(self) -> dict[str, Any]:
        """Of the reference; joined datasets keep none of their own."""
        return getattr(self.dataset, "subflavors", None) or {}


def leaves_of(tree: Tree | Leaf) -> list[Leaf]:
    """The leaves of a tree in the order of the YAML."""
    return [tree] if isinstance(tree, Leaf) else list(tree.keys())


def map_leaves(tree: Tree | Leaf, change: Callable[[Leaf], Leaf]) -> Tree | Leaf:
    """A tree, or a leaf alone, with every leaf changed."""
    if isinstance(tree, Leaf):
        return change(tree)
    changed = tree.map(change)
    assert changed is not None, "a tree of a metadataset has leaves"
    return changed


def runs_of(leaves: Iterable[Leaf]) -> list[RunFields]:
    """The different fields for the whole run that some leaves have."""
    return list(dict.fromkeys(leaf.run for leaf in leaves if leaf.run is not None))


@dataclass(kw_only=True)
class CarriedDataset(LoadedDataset):
    """A loaded dataset with its leaf, and the tree that has this leaf."""

    leaf: Leaf
    tree: Tree | Leaf


class CarriedWeight(float):
    """The share that stock Energon would make of the constant weights of a tree."""

    share: float
    factor: float | None  # of stock metadatasets around ours, None where there is none
    not_constant: str | None  # place of a weight by which stock Energon cannot draw

    def __new__(
        cls, share: float, not_constant: str | None, factor: float | None = None
    ) -> "CarriedWeight":
        self = super().__new__(cls, share * (1.0 if factor is None else factor))
        self.share, self.not_constant, self.factor = share, not_constant, factor
        return self

    def __mul__(self, other: Any) -> "CarriedWeight":
        before = 1.0 if self.factor is None else self.factor
        return CarriedWeight(self.share, self.not_constant, before * float(other))

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> "CarriedWeight":
        before = 1.0 if self.factor is None else self.factor
        return CarriedWeight(self.share, self.not_constant, before / float(other))

    def __float__(self) -> float:
        if self.not_constant is not None:
            found = "a schedule, a weight of 0, a weights_file or an interleave"
            advice = "put energon_ext.DynamicBlendMixin first among its base classes"
            raise ConfigError(
                f"{self.not_constant}: {found}, which this TaskEncoder does not know; {advice}, "
                f"or use energon_ext.PackedTaskEncoder."
            )
        return float.__add__(self, 0.0)


class Part(NamedTuple):
    """Datasets of one tree, or a dataset of a stock metadataset, with the factor around them."""

    tree: Tree | Leaf
    factor: float | None
    leaves: list[Leaf]
    datasets: list[LoadedDataset]


def carry(tree: Tree | Leaf, datasets: Sequence[LoadedDataset]) -> list[LoadedDataset]:
    """The datasets of all leaves of a tree, in the same order, with what they carry."""
    return [
        CarriedDataset(
            dataset=each.dataset,
            weight=each.weight,
            repetitions=each.repetitions,
            aux=each.aux,
            leaf=leaf,
            tree=tree,
        )
        for leaf, each in zip(leaves_of(tree), datasets, strict=True)
    ]


def carry_weighted(tree: Tree, datasets: Sequence[LoadedDataset]) -> list[LoadedDataset]:
    """The same, with the shares of the tree for their weights."""
    carried, not_constant = carry(tree, datasets), _not_constant(tree)
    numbers = {id(leaf): str(number) for number, leaf in enumerate(leaves_of(tree))}
    numbered = tree.map(lambda leaf: numbers[id(leaf)])
    assert numbered is not None, "a tree of a metadataset has leaves"
    shares = Mixture(numbered, [*numbers.values()], seed="").shares(0)
    for each, share in zip(carried, shares.tolist(), strict=True):
        each.weight = CarriedWeight(share, not_constant)
    return carried


def parts_of(datasets: Sequence[LoadedDataset]) -> list[Part]:
    """Trees that some loaded datasets carry; a dataset that carries nothing is a leaf."""
    parts: dict[int, Part] = {}
    for each in datasets:
        if isinstance(each, CarriedDataset):
            leaf, tree = each.leaf, each.tree
        else:
            leaf = tree = Leaf(dataset=each.dataset)
        part = parts.setdefault(id(tree), Part(tree, _factor(each), [], []))
        part.leaves.append(leaf)
        part.datasets.append(each)
    return list(parts.values())


def tree_of(parts: Sequence[Part]) -> Tree | Leaf:
    """Some parts as one tree: a constant blend of them where they are several."""
    trees = [part.tree for part in parts]
    if len(parts) == 1 and (parts[0].factor is None or isinstance(trees[0], Leaf)):
        return trees[0]
    factors = [ConstantWeight(1.0 if part.factor is None else part.factor) for part in parts]
    return Tree(Node(BLEND, factors), trees)


def _factor(dataset: LoadedDataset) -> float | None:
    if dataset.repetitions is not None:
        return float(len(dataset.dataset) * dataset.repetitions)
    weight = dataset.weight
    return weight.factor if isinstance(weight, CarriedWeight) else weight


def _not_constant(tree: Tree) -> str | None:
    for node in tree.nodes():
        for weight, where in zip(node.weights, node.wheres or [""] * len(node.weights)):
            is_constant = isinstance(weight, ConstantWeight) and weight.value > 0
            if not is_constant or node.rule != BLEND or node.live is not None:
                return where
    return None
