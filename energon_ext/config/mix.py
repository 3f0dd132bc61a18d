# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The mix of a run: its sources by key, and the tree of weights over them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from megatron.energon.metadataset.loader_interface import LoadedDataset

from energon_ext.config.carried import Leaf, find_trees, runs_of, tree_of
from energon_ext.config.references import DocumentFactory
from energon_ext.config.run_fields import RunFields
from energon_ext.config.source_key import keys_and_names, portable_path
from energon_ext.errors import ConfigError
from energon_ext.mixture.tree import BLEND, Node, Tree, check_nested_schedules
from energon_ext.samples.stored_files import num_samples
from energon_ext.state.match import SourceNames
from energon_ext.tokens.column_folder import ColumnFolder
from energon_ext.tokens.documents import Documents
from energon_ext.weights import ConstantWeight, LiveWeights, ScheduleAxis
from energon_ext.weights.live import LiveWeight


@dataclass(frozen=True, kw_only=True, eq=False)
class Entry(Leaf):
    """A source of a run.

    Attributes:
        key: its identity, see :func:`~energon_ext.config.source_key.source_key`.
        names: further names, by which its state is found if the key has changed.
        loaded: Energon's dataset with its repetitions and auxiliary data.
        excluded: numbers of the documents to exclude, sorted, int64 [n]; None for none.
        others: the folders that ``columns`` names, by the name of the column, once they are open.
    """

    key: str
    names: SourceNames
    loaded: LoadedDataset
    excluded: np.ndarray | None = None
    others: Mapping[str, ColumnFolder] = field(default_factory=dict)

    @property
    def naming(self) -> dict[str, Any]:
        """The fields of :class:`~energon_ext.plan.source.Source` that an entry gives."""
        return {
            "max_epochs": self.max_epochs,
            "names": self.names,
            "shown_as": self.name,
            "loss_weight": self.loss_weight,
        }

    @property
    def repetitions(self) -> float:
        """How often it is read where the metadataset repeats sources, or where nothing repeats."""
        return 1 if self.loaded.repetitions is None else self.loaded.repetitions

    @property
    def documents(self) -> Documents | None:
        """Its tokenized documents; None if it has samples."""
        return self.dataset.documents if isinstance(self.dataset, DocumentFactory) else None

    @property
    def has_samples(self) -> bool:
        """True if it is not token files."""
        return self.documents is None


def sample_entries(entries: Sequence[Entry]) -> list[Entry]:
    """Return the sources that are not token files."""
    return [entry for entry in entries if entry.has_samples]


def token_entries(entries: Sequence[Entry]) -> list[tuple[Entry, Documents]]:
    """Return the sources that are token files, with their documents."""
    found = ((entry, entry.documents) for entry in entries)
    return [(entry, documents) for entry, documents in found if documents is not None]


@dataclass(frozen=True, eq=False)
class Mix:
    """The sources of a run and how they are mixed.

    Attributes:
        entries: the sources, in YAML order.
        tree: weights over the keys of the sources.
        run: unit of breakpoints, skipped steps, excluded documents.
    """

    entries: tuple[Entry, ...]
    tree: Tree
    run: RunFields

    @property
    def axis(self) -> ScheduleAxis:
        """The unit of breakpoints."""
        return ScheduleAxis(self.run.axis)

    def axis_with(self, given: ScheduleAxis | None) -> ScheduleAxis:
        """Return the axis with the end of the run that a launch script gives in the same unit."""
        if given is None:
            return self.axis
        if given.unit not in (None, self.run.axis):
            counts = f"{self.run.where or 'the metadataset'} counts {self.run.axis}"
            raise ConfigError(
                f"schedule_axis: {given.unit} found in the launch script, but {counts}; set "
                f"`schedule_axis: {given.unit}` in the file, so that every command sees it."
            )
        return replace(given, unit=self.run.axis)


def mix_of(datasets: Sequence[LoadedDataset]) -> Mix:
    """Return the mix of the datasets that Energon passes to a TaskEncoder.

    For validation, Energon passes one dataset of the tree; the mix then contains only this one.

    Raises:
        ConfigError: there is no dataset, a dataset has no samples, two sources have the same name,
            schedules are nested, or metadatasets contradict each other.
    """
    if not datasets:
        raise ConfigError("The metadataset names no source; list at least one.")
    parts = find_trees(datasets)
    leaves = [leaf for part in parts for leaf in part.leaves]
    for leaf in leaves:
        if leaf.text_key is not None and isinstance(leaf.dataset, DocumentFactory):
            leaf.dataset.read_field(leaf.text_key)
    loaded = [dataset for part in parts for dataset in part.datasets]
    first, *others = runs_of(leaves) or [RunFields()]
    run = first.merge(others, inside=False)
    excluded_of = run.exclude.documents_of
    entries = tuple(
        Entry(
            **vars(leaf),
            key=key,
            names=names,
            loaded=dataset,
            excluded=excluded_of(key, leaf.name),
        )
        for leaf, (key, names), dataset in zip(leaves, keys_and_names(leaves), loaded)
    )
    _check_entries(entries)
    keys = {id(leaf): entry.key for leaf, entry in zip(leaves, entries)}
    tree = tree_of(parts)
    if isinstance(tree, Leaf):
        tree = Tree(Node(BLEND, [ConstantWeight(1.0)]), [tree])
    keyed: Any = tree.map(lambda leaf: keys.get(id(leaf)))
    tree = _with_names(keyed.sorted(), entries)
    check_nested_schedules(tree)
    return Mix(entries, tree, run)


def _check_entries(entries: Sequence[Entry]) -> None:
    uses = Counter(entry.key for entry in entries)
    uses.update(entry.name for entry in entries if entry.name is not None)
    for entry in entries:
        if num_samples(entry.dataset) == 0:
            source = f"Source {entry.key}" + (f" ({entry.where})" if entry.where else "")
            raise ConfigError(f"{source} has no samples; prepare it again or remove it.")
        if entry.name not in (None, entry.key) and uses[entry.name] > 1:
            found = f"{entry.name!r} is the name of two sources, such as {entry.key}"
            raise ConfigError(f"name: {found}; rename one.")


def _with_names(tree: Tree, entries: Sequence[Entry]) -> Tree:
    """Name the nodes of a tree after their metadatasets, as sources are named.

    The outermost node has no name, so that it stays the same when its file is moved.
    """
    seen: Counter[str] = Counter()
    root, titles = entries[0].root, {entry.key: entry.name for entry in entries}

    def name(tree: Tree, is_outermost: bool) -> Tree:
        node, location = tree.node, tree.node.location
        if is_outermost or not location:
            node = replace(node, identity=location)
        else:
            seen[location] += 1
            number = f"#{seen[location]}" if seen[location] > 1 else ""
            path, _, split = location.rpartition(":")
            title = f"{portable_path(path, root)}:{split}{number}"
            node = replace(node, name=title, identity=f"{location}{number}")
        members = [name(m, False) if isinstance(m, Tree) else m for m in tree.members]
        if node.live is not None:
            keys = [m.node.name if isinstance(m, Tree) else m for m in members]
            names = [[name for name in (key, titles.get(key)) if name] for key in keys]
            file = str(node.live.path)
            live = LiveWeights(file, sum(names, []), portable_path(file, root))
            weights = [LiveWeight(live, *each) for each in zip(names, node.weights)]
            node = replace(node, live=live, weights=weights)
        return Tree(node, members)

    return name(tree, True)
