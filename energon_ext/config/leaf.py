# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""One source as a leaf of the tree: what Energon opens, and what the YAML says about it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from megatron.energon.epathlib import EPath
from megatron.energon.flavors.base_dataset import BaseCoreDatasetFactory

from energon_ext.splice.config import SpliceFields


@dataclass(frozen=True, kw_only=True, eq=False)
class EntryFields:
    """What an entry of a metadataset says about its sources.

    Attributes:
        where: place in the YAML, for messages; empty without a YAML.
        max_epochs: most passes over the source in a run, None for no limit.
        name: display name of the source, None for its key.
        splice: how its documents are shown, None for in rows.
        splice_where: place of that in the YAML.
    """

    where: str = ""
    max_epochs: int | None = None
    name: str | None = None
    splice: SpliceFields | None = None
    splice_where: str = ""

    def around(self, leaf: Leaf) -> Leaf:
        """A leaf with what an entry around it says.

        What is said closer to the source holds; of two limits on the epochs, the smaller one does.
        """
        limits = [n for n in (self.max_epochs, leaf.max_epochs) if n is not None]
        spliced = self if leaf.splice is None else leaf
        return replace(
            leaf,
            where=leaf.where or self.where,
            max_epochs=min(limits, default=None),
            name=leaf.name or self.name,
            splice=spliced.splice,
            splice_where=spliced.splice_where,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Leaf(EntryFields):
    """A source of a metadataset.

    Attributes:
        dataset: Energon's factory.
        root: folder of the outermost metadataset; its key is relative to it, or absolute for None.
    """

    dataset: BaseCoreDatasetFactory
    root: EPath | None = None

    @property
    def subflavors(self) -> dict[str, Any]:
        """Of the reference; joined datasets keep none of their own."""
        return getattr(self.dataset, "subflavors", None) or {}
