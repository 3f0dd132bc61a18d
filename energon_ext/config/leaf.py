# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""One source as a leaf of the tree: what Energon opens, and what the YAML says about it."""

from dataclasses import dataclass
from typing import Any, Callable, Iterable

from megatron.energon.epathlib import EPath
from megatron.energon.flavors.base_dataset import BaseCoreDatasetFactory

from energon_ext.config.run_fields import RunFields
from energon_ext.mixture.tree import Tree
from energon_ext.splice.config import SpliceFields


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
