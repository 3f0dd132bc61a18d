# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Carries the leaves and the tree of a metadataset through Energon's list of loaded datasets.

A metadataset returns datasets, each with a float weight, which stock metadatasets around ours
multiply and divide. So each dataset carries its leaf and the whole tree, and its weight carries the
factor from outside the tree. :func:`find_trees` recovers the trees. A TaskEncoder without our mixin
uses the float as a constant weight and rejects schedules and interleaves.
"""

from dataclasses import dataclass, field, fields
from typing import Any, Callable, Iterable, Mapping, NamedTuple, Sequence

from megatron.energon.epathlib import EPath
from megatron.energon.flavors.base_dataset import BaseCoreDatasetFactory
from megatron.energon.metadataset.loader_interface import LoadedDataset

from energon_ext.config.run_fields import RunFields
from energon_ext.errors import ConfigError
from energon_ext.mixture.mixture import Mixture
from energon_ext.mixture.tree import BLEND, Node, Tree
from energon_ext.plan.arrangement import Arrangement
from energon_ext.plan.budget import Budget
from energon_ext.splice.config import SpliceFields
from energon_ext.tokens.transforms import Transform
from energon_ext.weights import ConstantWeight, WeightSpec


@dataclass(frozen=True, kw_only=True, eq=False)
class Leaf:
    """A source of a metadataset."""

    dataset: BaseCoreDatasetFactory  # Energon's
    where: str = ""  # place in the YAML, for messages; empty without a YAML
    max_epochs: int | None = None  # maximum passes over the source in a run, None for no limit
    name: str | None = None  # display name of the source, None to use its key
    splice: SpliceFields | None = None  # None if its documents are not spliced
    splice_where: str = ""  # place of the splice in the YAML
    text_key: str | None = None  # field of its samples with the text, None for the usual ones
    text_key_where: str = ""  # place of that field's name in the YAML
    block_docs: int | None = None  # documents of a block, None for the default of the data
    columns: Mapping[str, str] = field(default_factory=dict)  # folders of columns of others
    transform: Transform | None = None  # change of its documents when they are read
    order: Arrangement | None = None  # of its documents in an epoch, None for a random one
    loss_weight: WeightSpec | None = None  # factor of its labels in the loss, None for 1
    budget: Budget | None = None  # of the nested subset to read, None for all
    metadataset: EPath | None = None  # the outermost one of ours, if any
    run: RunFields | None = None  # run-wide fields of its metadatasets

    @property
    def root(self) -> EPath | None:
        """The folder that the key is relative to; None if the key is absolute."""
        return None if self.metadataset is None else self.metadataset.parent

    @property
    def subflavors(self) -> dict[str, Any]:
        """Subflavors of the reference; empty for joined datasets."""
        return getattr(self.dataset, "subflavors", None) or {}


#: What an entry may ask for that only our encoders do, and what a field is called in the YAML.
_FIELDS_OF_ENTRIES = (
    *("max_epochs", "splice", "text_key", "block_docs", "columns", "transform", "order"),
    *("loss_weight", "budget"),
)
_YAML_NAMES = {"text_key": "key", "budget": "subset"}


def leaves_of(tree: Tree | Leaf) -> list[Leaf]:
    """Return the leaves of a tree in YAML order."""
    return [tree] if isinstance(tree, Leaf) else list(tree.keys())


def map_leaves(tree: Tree | Leaf, change: Callable[[Leaf], Leaf]) -> Tree | Leaf:
    """Return a tree, or a single leaf, with every leaf changed."""
    if isinstance(tree, Leaf):
        return change(tree)
    changed = tree.map(change)
    assert changed is not None, "a tree of a metadataset has leaves"
    return changed


def runs_of(leaves: Iterable[Leaf]) -> list[RunFields]:
    """Return the distinct run-wide fields of some leaves."""
    return list(dict.fromkeys(leaf.run for leaf in leaves if leaf.run is not None))


@dataclass(kw_only=True)
class CarriedDataset(LoadedDataset):
    """A loaded dataset with its leaf and the tree that contains the leaf."""

    leaf: Leaf
    tree: Tree | Leaf


class CarriedWeight(float):
    """The share that stock Energon would compute from the constant weights of a tree."""

    share: float
    factor: float | None  # of the stock metadatasets around ours, None if there are none
    not_constant: str | None  # place of a weight that stock Energon cannot use, None if it can

    def __new__(
        cls, share: float, not_constant: str | None, factor: float | None = None
    ) -> "CarriedWeight":
        self = super().__new__(cls, share * (1.0 if factor is None else factor))
        self.share, self.not_constant, self.factor = share, not_constant, factor
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what makes a copy, which may be in another process."""
        return CarriedWeight, (self.share, self.not_constant, self.factor)

    def __mul__(self, other: Any) -> "CarriedWeight":
        before = 1.0 if self.factor is None else self.factor
        return CarriedWeight(self.share, self.not_constant, before * float(other))

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> "CarriedWeight":
        before = 1.0 if self.factor is None else self.factor
        return CarriedWeight(self.share, self.not_constant, before / float(other))

    def __float__(self) -> float:
        if self.not_constant is not None:
            raise ConfigError(
                f"{self.not_constant}: this TaskEncoder does not support schedules, weights of 0, "
                f"a weights_file, an interleave or further fields of entries; make "
                f"energon_ext.DynamicBlendMixin its first base class, or use "
                f"energon_ext.PackedTaskEncoder."
            )
        return float.__add__(self, 0.0)


class CarriedTree(NamedTuple):
    """The datasets of one tree, or one dataset of a stock metadataset, and their outer factor."""

    tree: Tree | Leaf
    factor: float | None
    leaves: list[Leaf]
    datasets: list[LoadedDataset]


def carry(tree: Tree | Leaf, datasets: Sequence[LoadedDataset]) -> list[LoadedDataset]:
    """Attach a tree and its leaves to the datasets of the leaves, which are in the same order."""
    names = [field.name for field in fields(LoadedDataset)]
    return [
        CarriedDataset(**{name: getattr(loaded, name) for name in names}, leaf=leaf, tree=tree)
        for leaf, loaded in zip(leaves_of(tree), datasets, strict=True)
    ]


def carry_weighted(tree: Tree, datasets: Sequence[LoadedDataset]) -> list[LoadedDataset]:
    """Attach a tree as :func:`carry` does, and set the weights to the shares in the tree."""
    carried, not_constant = carry(tree, datasets), _not_constant(tree)
    numbers = {id(leaf): str(number) for number, leaf in enumerate(leaves_of(tree))}
    numbered = tree.map(lambda leaf: numbers[id(leaf)])
    assert numbered is not None, "a tree of a metadataset has leaves"
    shares = Mixture(numbered, [*numbers.values()]).shares(0)
    for dataset, share in zip(carried, shares.tolist(), strict=True):
        dataset.weight = CarriedWeight(share, not_constant)
    return carried


def find_trees(datasets: Sequence[LoadedDataset]) -> list[CarriedTree]:
    """Return the trees that loaded datasets carry; a dataset that carries none is a leaf."""
    parts: dict[int, CarriedTree] = {}
    for loaded in datasets:
        if isinstance(loaded, CarriedDataset):
            leaf, tree = loaded.leaf, loaded.tree
        else:
            leaf = tree = Leaf(dataset=loaded.dataset)
        part = parts.setdefault(id(tree), CarriedTree(tree, _factor(loaded), [], []))
        part.leaves.append(leaf)
        part.datasets.append(loaded)
    return list(parts.values())


def tree_of(parts: Sequence[CarriedTree]) -> Tree | Leaf:
    """Return parts as one tree: a constant blend of them if there are several."""
    trees = [part.tree for part in parts]
    if len(parts) == 1 and (parts[0].factor is None or isinstance(trees[0], Leaf)):
        return trees[0]
    factors = [ConstantWeight(1.0 if part.factor is None else part.factor) for part in parts]
    return Tree(Node(BLEND, factors), trees)


def _factor(loaded: LoadedDataset) -> float | None:
    if loaded.repetitions is not None:
        return float(len(loaded.dataset) * loaded.repetitions)
    weight = loaded.weight
    return weight.factor if isinstance(weight, CarriedWeight) else weight


def _not_constant(tree: Tree) -> str | None:
    for node in tree.nodes():
        for weight, where in zip(node.weights, node.wheres or [""] * len(node.weights)):
            is_constant = isinstance(weight, ConstantWeight) and weight.value > 0
            if not is_constant or node.rule != BLEND or node.live is not None:
                return where
    given = (
        f"{leaf.where}.{_YAML_NAMES.get(name, name)}"
        for leaf in leaves_of(tree)
        for name in _FIELDS_OF_ENTRIES
        if getattr(leaf, name)
    )
    return next(given, None)
