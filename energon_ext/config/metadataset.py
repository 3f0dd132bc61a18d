# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""A metadataset whose blend weights may be schedules.

Everything but the weights is Energon's: references, nesting, joins, splits, subsets and preparation
are inherited. Every source carries the whole tree in a
:class:`~energon_ext.config.carried_weight.CarriedWeight`, which any TaskEncoder with
:class:`~energon_ext.encoders.mixin.DynamicBlendMixin` understands. Any other takes it for the float
that stock Energon makes of constant weights, and refuses schedules and interleaves.
"""

# No `from __future__ import annotations` and no `A | B` in fields here: Energon's parser reads the
# annotations, and knows types and typing.Union only.
import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Union

from megatron.energon.epathlib import EPath
from megatron.energon.flavors.webdataset.structs import DatasetSubset
from megatron.energon.metadataset.loader_interface import (
    DatasetBlendMode,
    LoadedDataset,
    LoadedDatasetList,
)
from megatron.energon.metadataset.metadataset_v2 import (
    BlendEpochizedDatasetReference,
    BlendEpochizedJoinDatasetReference,
    MetadatasetBlend,
    MetadatasetBlendEpochized,
    MetadatasetJoin,
    MetadatasetV2,
)

from energon_ext.config.carried_weight import Part, carry, parts_of, tree_of
from energon_ext.config.leaf import EntryFields, Leaf
from energon_ext.config.references import AnyDatasetReference
from energon_ext.config.run_fields import RunFields, run_fields
from energon_ext.config.whole import Whole, map_leaves
from energon_ext.errors import ConfigError, EnergonExtError
from energon_ext.mixture.tree import BLEND, INTERLEAVE, NEW_SOURCES, Node, Tree
from energon_ext.splice.config import splice_from_config
from energon_ext.weights import WeightSpec, weight_from_config

#: What a blend of Energon 7.4 and those of here have; what a later one adds, nothing here reads.
_FIELDS = {"blend", "interleave", "subset", "allow_nested_schedules", "new_source"}


@contextlib.contextmanager
def errors_of_energon(where: str) -> Iterator[None]:
    """What Energon only asserts of an entry, said with its place."""
    try:
        yield
    except EnergonExtError:
        raise
    except (ArithmeticError, AssertionError, KeyError, TypeError, ValueError) as error:
        said = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        raise ConfigError(f"{where}: {said}.") from error


@dataclass
class ScheduledEntryMixin:
    """What an entry says beside what is read."""

    weight: Any = 1.0  # a number or a schedule
    max_epochs: Any = None  # most passes over each source of the entry, None for no limit
    name: Any = None  # of the one source, for people; its state hangs on its key
    splice: Any = None  # fields of a splice: its documents at many positions


@dataclass(kw_only=True)
class ScheduledDatasetReference(ScheduledEntryMixin, AnyDatasetReference):
    """A path with a weight."""


@dataclass(kw_only=True)
class ScheduledJoinReference(ScheduledEntryMixin, MetadatasetJoin):
    """A join with a weight."""


@dataclass(kw_only=True)
class ScheduledBlend(MetadatasetBlend):
    """One blend node: entries and their weights, scheduled or not.

    Attributes:
        allow_nested_schedules: a schedule above and one below multiply, instead of being an error.
    """

    blend: list[Union[ScheduledDatasetReference, ScheduledJoinReference]]  # noqa: UP007
    allow_nested_schedules: bool = False

    _name = "blend"
    _specs: list[WeightSpec] = field(default_factory=list, init=False)
    _entries: list[EntryFields] = field(default_factory=list, init=False)
    _where: str = field(default="", init=False)

    def post_initialize(self, mds_path: EPath | None = None) -> None:
        self._where = str(mds_path)
        assert mds_path is not None, "Energon gives the path of the metadataset"
        for each in dataclasses.fields(self):
            factory, found = each.default_factory, getattr(self, each.name)
            default = factory() if callable(factory) else each.default
            if each.init and each.name not in _FIELDS and found != default:
                raise ConfigError(
                    f"{mds_path}: {self._name}.{each.name}: {found!r} found, which is read on "
                    f"entries only; say it on each of them."
                )
        if not self.blend:
            raise ConfigError(f"{mds_path}: an empty `{self._name}`; list at least one source.")
        self._specs = [
            weight_from_config(entry.weight, f"{self._entry_name(index)}.weight")
            for index, entry in enumerate(self.blend)
        ]
        for index, entry in enumerate(self.blend):
            where, limit, name = self._entry_name(index), entry.max_epochs, entry.name
            is_count = isinstance(limit, int) and not isinstance(limit, bool) and limit >= 1
            if limit is not None and not is_count:
                raise ConfigError(
                    f"{where}.max_epochs: {limit!r} found, an integer >= 1 is needed; leave it out "
                    f"for no limit, or the entry for no epoch at all."
                )
            if name is not None and not (isinstance(name, str) and name.strip()):
                raise ConfigError(f"{where}.name: {name!r} found, a text is needed.")
            splice = entry.splice
            if splice is not None:
                splice = splice_from_config(splice, f"{where}.splice")
            with errors_of_energon(where):
                entry.post_initialize(mds_path)
            where = self._entry_name(index)  # its path is absolute from here on
            self._entries.append(
                EntryFields(
                    where=where,
                    max_epochs=limit,
                    name=name,
                    splice=splice,
                    splice_where=f"{where}.splice",
                )
            )

    def get_datasets(
        self, *, subset: DatasetSubset | None = None, **kwargs: Any
    ) -> LoadedDatasetList:
        with errors_of_energon(f"{self._where}: {self._name}.subset"):
            subset = self._get_subset(subset)
        members: list[Tree | Leaf] = []
        kept: list[int] = []
        run: list[RunFields] = []
        datasets: list[LoadedDataset] = []
        for index, (entry, fields) in enumerate(zip(self.blend, self._entries)):
            with errors_of_energon(fields.where):
                inner = entry.get_datasets(subset=subset, **kwargs)
            if inner.blend_mode is DatasetBlendMode.SAMPLE_REPETITIONS:
                raise ConfigError(
                    f"{fields.where}: a `blend_epochized` cannot be an entry of a "
                    f"`{self._name}`; use `blend_epochized` on both levels, or on none."
                )
            if entry.name is not None and len(inner.datasets) != 1:
                count = len(inner.datasets)
                raise ConfigError(f"{fields.where}.name: {entry.name!r} for {count} sources.")
            if inner.datasets:
                parts = parts_of(inner.datasets)
                members.append(map_leaves(tree_of(parts), fields.around))
                kept.append(index)
                run += [each for part in parts for each in part.whole.run]
                datasets += inner.datasets
        whole = Whole(Tree(self._node().of_members(kept), members), run)
        datasets = carry(whole, datasets, None, weighted=True)
        return LoadedDatasetList(blend_mode=DatasetBlendMode.DATASET_WEIGHT, datasets=datasets)

    def _node(self) -> Node:
        return Node(
            BLEND,
            self._specs,
            [f"{fields.where}.weight" for fields in self._entries],
            allow_nested_schedules=self.allow_nested_schedules,
        )

    def _entry_name(self, index: int) -> str:
        return (
            f"{self._where}: {self._name}[{index}] ({getattr(self.blend[index], 'path', 'join')})"
        )


@dataclass(kw_only=True)
class Interleave(ScheduledBlend):
    """One interleave node: weights are target shares of tokens, kept to a row.

    A source that a resumed state does not know starts, by ``new_source``, at the ``baseline``,
    level with the source that is furthest behind, or at ``zero``.
    """

    interleave: list[Union[ScheduledDatasetReference, ScheduledJoinReference]]  # noqa: UP007
    new_source: str = "baseline"

    _name = "interleave"
    #: What the inherited methods call the entries.
    blend: list[Any] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.blend = self.interleave

    def post_initialize(self, mds_path: EPath | None = None) -> None:
        if self.new_source not in NEW_SOURCES:
            raise ConfigError(
                f"{mds_path}: new_source: {self.new_source!r} found, {' or '.join(NEW_SOURCES)}."
            )
        super().post_initialize(mds_path)

    def _node(self) -> Node:
        return dataclasses.replace(super()._node(), rule=INTERLEAVE, new_source=self.new_source)


@dataclass(kw_only=True)
class UncappedEpochizedReference(BlendEpochizedDatasetReference, AnyDatasetReference):
    """A path with repetitions, which leave nothing for a limit to say."""

    max_epochs: Any = None


@dataclass(kw_only=True)
class UncappedBlendEpochized(MetadatasetBlendEpochized):
    """Energon's ``blend_epochized``, which says so where a limit is asked of it."""

    blend_epochized: list[
        Union[UncappedEpochizedReference, BlendEpochizedJoinDatasetReference]  # noqa: UP007
    ]

    def post_initialize(self, mds_path: EPath | None = None) -> None:
        for index, entry in enumerate(self.blend_epochized):
            if getattr(entry, "max_epochs", None) is not None:
                raise ConfigError(
                    f"{mds_path}: blend_epochized[{index}] ({entry.path}).max_epochs: an epochized "
                    f"blend reads each source as often as its `repetitions` say, and then all of "
                    f"it again; use `blend` with max_epochs, or leave it out."
                )
        super().post_initialize(mds_path)


@dataclass(kw_only=True)
class ScheduledMetadataset(MetadatasetV2):
    """The YAML class: ``__module__: energon_ext``, ``__class__: ScheduledMetadataset``.

    The name differs from Energon's own ``MetadatasetV2`` on purpose: where the plugin is not
    installed, Energon falls back to its class of the same name, and would drop the schedules
    without a word.
    """

    splits: dict[
        str,
        Union[  # noqa: UP007
            ScheduledBlend, Interleave, UncappedBlendEpochized, MetadatasetJoin, AnyDatasetReference
        ],
    ]
    schedule_axis: Any = None  # what breakpoints count; in the outermost metadataset
    skip: Any = None  # ranges of steps that are planned and not read
    exclude: Any = None  # a file of documents that are not read

    _run: RunFields = field(default_factory=RunFields, init=False)

    def post_initialize(self, mds_path: EPath | None = None) -> None:
        self._run = run_fields(self.schedule_axis, self.skip, self.exclude, self.path)
        with errors_of_energon(str(self.path)):
            super().post_initialize(mds_path)

    def get_datasets(self, *, split_part: str, **kwargs: Any) -> LoadedDatasetList:
        where = f"{self.path}: {split_part}"
        if split_part not in self.splits:
            raise ConfigError(
                f"{self.path}: no split {split_part!r}; it has {', '.join(self.splits)}."
            )
        with errors_of_energon(where):
            loaded = super().get_datasets(split_part=split_part, **kwargs)
        parts = parts_of(loaded.datasets)
        inner = [each for part in parts for each in part.whole.run]
        run = self._run.merged(inner, inside=True)
        weighted = loaded.blend_mode is DatasetBlendMode.DATASET_WEIGHT
        datasets: list[LoadedDataset] = []
        for part in parts:
            whole = Whole(self._placed(part, split_part), [run])
            datasets += carry(whole, part.datasets, part.factor, weighted=weighted)
        return LoadedDatasetList(blend_mode=loaded.blend_mode, datasets=datasets)

    def _placed(self, part: Part, split_part: str) -> Tree | Leaf:
        """A tree with its place: of its outermost node, and of leaves that have none."""
        fields = EntryFields(where=f"{self.path}: {split_part}")

        def place(leaf: Leaf) -> Leaf:
            return dataclasses.replace(fields.around(leaf), root=self.path.parent)

        tree = map_leaves(part.whole.tree, place)
        if isinstance(tree, Leaf) or part.factor is not None:  # the outermost node is a stock one
            return tree
        node = dataclasses.replace(tree.node, location=f"{self.path}:{split_part}")
        return dataclasses.replace(tree, node=node)
