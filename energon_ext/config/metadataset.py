# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""A metadataset whose blend weights may be schedules.

References, nesting, joins, splits, subsets and preparation are inherited from Energon. Datasets
carry the tree of weights, see :mod:`energon_ext.config.carried`.
"""

# No `from __future__ import annotations` and no `A | B` in fields here: Energon's parser reads the
# annotations, and supports only types and typing.Union.
import contextlib
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Iterator, Literal, Sequence, Union

from megatron.energon.epathlib import EPath
from megatron.energon.flavors.webdataset.structs import DatasetSubset
from megatron.energon.metadataset.loader_interface import (
    DatasetBlendMode,
    DatasetLoaderInterface,
    LoadedDataset,
    LoadedDatasetList,
)
from megatron.energon.metadataset.metadataset_v2 import (
    BlendEpochizedDatasetReference,
    BlendEpochizedJoinDatasetReference,
    MetadatasetBlendEpochized,
    MetadatasetJoin,
    MetadatasetV2,
    Subset,
    SubsetRatioMixin,
)

from energon_ext.arguments import check_integer, check_number, choices
from energon_ext.batch.columns import check_names
from energon_ext.compat import combine_subsets
from energon_ext.config import carried
from energon_ext.config.carried import (
    CarriedTree,
    Leaf,
    carry,
    find_trees,
    map_leaves,
    runs_of,
    tree_of,
)
from energon_ext.config.references import AnyDatasetReference, check_blocks
from energon_ext.config.run_fields import RunFields, run_fields
from energon_ext.errors import ConfigError, EnergonExtError, one_line
from energon_ext.mixture.tree import BLEND, INTERLEAVE, Node, Tree
from energon_ext.plan.arrangement import order_from_config
from energon_ext.plan.budget import FRACTION, Budget, budget_from_config
from energon_ext.splice.config import splice_from_config
from energon_ext.storage.object_store import file_name
from energon_ext.tokens.transforms import transform_from_config
from energon_ext.weights import LiveWeights, weight_from_config

#: Exceptions that Energon raises for unexpected file content.
_ERRORS = (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError)


@contextlib.contextmanager
def errors_of_energon(where: str) -> Iterator[None]:
    """Turn Energon's assertions about an entry into errors that name its place."""
    try:
        yield
    except EnergonExtError:
        raise
    except _ERRORS as error:
        reason = one_line(error)
        raise ConfigError(f"{where}: {reason}.") from error
    except SystemError as error:  # around whatever the index of an auxiliary dataset raised
        reason = one_line(error.__cause__ or error)
        raise ConfigError(
            f"{where}: an auxiliary dataset cannot be opened ({reason}); run `energon prepare` on "
            f"it again."
        ) from error


def _whole_range() -> Any:
    """Return the range as in a YAML file: Energon's parser reads defaults, too."""
    return ["0%", "100%"]


@dataclass(kw_only=True)
class EntrySubset(Subset):
    """The part of an entry to read: a range of it, as in Energon, and of that a nested subset."""

    range: tuple[str | int, str | int] = field(default_factory=_whole_range)
    tokens: Any = None  # a budget: at most one of the three
    documents: Any = None
    fraction: Any = None


@dataclass
class ScheduledEntryMixin:
    """Fields of an entry in addition to its path."""

    weight: Any = 1.0  # a number or a schedule
    max_epochs: Any = None  # maximum passes over each source of the entry, None for no limit
    name: Any = None  # display name of the only source; its state is saved under its key
    splice: Any = None  # fields of a splice, which shows its documents at many positions
    key: Any = None  # field of the samples that contains the text, None for `text` or `txt`
    block_docs: Any = None  # documents of a shuffled source that are read close to each other
    columns: Any = None  # folder of each column of others, by its name
    transform: Any = None  # change of its documents when they are read
    order: Any = None  # how its documents follow one another in an epoch
    loss_weight: Any = None  # factor of its labels in the loss: a number or a schedule
    subset: Union[None, EntrySubset] = None  # noqa: UP007 - the part of it to read

    where: str = field(default="", init=False)  # place in the YAML, for messages
    budget: Any = field(default=None, init=False)  # that of the subset

    def read(self, where: str, mds_path: EPath | None) -> None:
        """Check the fields, and parse the weight and the splice."""
        self.where = where
        self.weight = weight_from_config(self.weight, f"{where}.weight")
        if self.loss_weight is not None:
            self.loss_weight = weight_from_config(self.loss_weight, f"{where}.loss_weight")
        if self.max_epochs is not None:
            check_integer(f"{where}.max_epochs", self.max_epochs, 1)
        if self.block_docs is not None:
            check_integer(f"{where}.block_docs", self.block_docs, 1)
        if self.name is not None and not (isinstance(self.name, str) and self.name.strip()):
            raise ConfigError(f"{where}.name: {self.name!r} found, text is needed.")
        if self.key is not None and not (isinstance(self.key, str) and self.key):
            raise ConfigError(f"{where}.key: {self.key!r} found, the name of a field is needed.")
        if self.splice is not None:
            self.splice = splice_from_config(self.splice, f"{where}.splice")
        if self.columns is not None:
            self.columns = _folders_of_columns(self.columns, f"{where}.columns", mds_path)
        if self.transform is not None:
            self.transform = transform_from_config(self.transform, f"{where}.transform")
        if self.order is not None:
            self.order = order_from_config(self.order, f"{where}.order")
        if self.subset is not None:
            self.budget = budget_from_config(vars(self.subset), f"{where}.subset")

    def around(self, leaf: Leaf) -> Leaf:
        """Return a leaf below this entry with the fields of the entry.

        Fields closer to the source take precedence; of two epoch limits, the smaller one does.
        """
        limits = [n for n in (self.max_epochs, leaf.max_epochs) if n is not None]
        return replace(
            leaf,
            where=leaf.where or self.where,
            max_epochs=min(limits, default=None),
            name=leaf.name or self.name,
            splice=leaf.splice or self.splice,
            splice_where=leaf.splice_where or (f"{self.where}.splice" if self.splice else ""),
            text_key=leaf.text_key or self.key,
            text_key_where=leaf.text_key_where or (f"{self.where}.key" if self.key else ""),
            block_docs=leaf.block_docs or self._block_docs_of(leaf),
            columns={**(self.columns or {}), **leaf.columns},
            transform=leaf.transform or self.transform,
            order=self.order if leaf.order is None else leaf.order,
            loss_weight=leaf.loss_weight or self.loss_weight,
            budget=self._budget_of(leaf),
        )

    def _budget_of(self, leaf: Leaf) -> Budget | None:
        """Return the budget of a leaf, which only one entry above it may give."""
        if leaf.budget is not None and self.budget is not None:
            raise ConfigError(
                f"{self.budget.where}.{self.budget.unit}: {leaf.budget.where} gives a part of "
                f"the same source; remove one of the two."
            )
        return leaf.budget or self.budget

    def _block_docs_of(self, leaf: Leaf) -> Any:
        """Return the field, which needs token files in random order."""
        if self.block_docs not in (None, 1):
            check_blocks(leaf.dataset, f"{self.where}.block_docs: {self.block_docs} found")
        return self.block_docs


@dataclass(kw_only=True)
class ScheduledDatasetReference(ScheduledEntryMixin, AnyDatasetReference):
    """A path with a weight."""


@dataclass(kw_only=True)
class ScheduledJoinReference(ScheduledEntryMixin, MetadatasetJoin):
    """A join with a weight."""


@dataclass(kw_only=True)
class WeightedEntries(SubsetRatioMixin, DatasetLoaderInterface):
    """One node: entries and their weights, in a field named after the rule of the node.

    This is not a subclass of Energon's blend: if a later Energon adds fields to its own, they are
    rejected here instead of being dropped.
    """

    allow_nested_schedules: bool = False  # multiply schedules above and below instead of raising
    weights_file: Any = None  # file of LiveWeights, relative to the metadataset

    rule: ClassVar[str]
    _where: str = field(default="", init=False)
    _live: Any = field(default=None, init=False)

    @property
    def entries(self) -> Sequence[Any]:
        return getattr(self, self.rule)

    def post_initialize(self, mds_path: EPath | None = None) -> None:
        self._where = f"{mds_path}: {self.rule}"
        if not self.entries:
            raise ConfigError(f"{mds_path}: an empty `{self.rule}`; list at least one source.")
        if self.weights_file is not None:
            self._live = _live_weights(self.weights_file, mds_path, f"{self._where}.weights_file")
        for index, entry in enumerate(self.entries):
            entry.read(f"{self._where}[{index}] ({getattr(entry, 'path', 'join')})", mds_path)
            with errors_of_energon(entry.where):
                entry.post_initialize(mds_path)

    def traverse(self, mds_path: EPath | None = None, **kwargs: Any) -> list[Any]:
        return [item for entry in self.entries for item in entry.traverse(mds_path, **kwargs)]

    def prepare(self, split_part: str | None = None) -> list[EPath]:
        return [path for entry in self.entries for path in entry.prepare(split_part=split_part)]

    def get_datasets(
        self, *, subset: DatasetSubset | None = None, **kwargs: Any
    ) -> LoadedDatasetList:
        with errors_of_energon(f"{self._where}.subset"):
            subset = combine_subsets(self, subset)
        members: list[Tree | Leaf] = []
        datasets: list[LoadedDataset] = []
        for entry in self.entries:
            with errors_of_energon(entry.where):
                inner = entry.get_datasets(subset=subset, **kwargs)
            if inner.blend_mode is DatasetBlendMode.SAMPLE_REPETITIONS:
                found = f"a `blend_epochized` cannot be an entry of a `{self.rule}`"
                advice = "use `blend_epochized` on both levels, or on neither"
                raise ConfigError(f"{entry.where}: {found}; {advice}.")
            count = len(inner.datasets)
            if not count:
                raise ConfigError(f"{entry.where}: names no source; remove the entry.")
            if entry.name is not None and count > 1:
                found = f"{entry.name!r} would name {count} sources"
                raise ConfigError(f"{entry.where}.name: {found}; name each of them instead.")
            if entry.columns and count > 1:
                found = f"the entry has {count} sources"
                raise ConfigError(f"{entry.where}.columns: {found}; give each of them its own.")
            if entry.budget is not None and entry.budget.unit != FRACTION and count > 1:
                raise ConfigError(
                    f"{entry.where}.subset.{entry.budget.unit}: the entry has {count} sources; "
                    f"give a `fraction` of each, or each of them its own."
                )
            members.append(map_leaves(tree_of(find_trees(inner.datasets)), entry.around))
            datasets += inner.datasets
        datasets = carried.carry_weighted(Tree(self._node(), members), datasets)
        return LoadedDatasetList(blend_mode=DatasetBlendMode.DATASET_WEIGHT, datasets=datasets)

    def _node(self) -> Node:
        return Node(
            self.rule,
            [entry.weight for entry in self.entries],
            [f"{entry.where}.weight" for entry in self.entries],
            allow_nested_schedules=self.allow_nested_schedules,
            live=self._live,
        )


def _folders_of_columns(value: Any, where: str, mds_path: EPath | None) -> dict[str, str]:
    """Return the folder of each column, as a path that can be opened."""
    is_mapping = isinstance(value, dict) and all(
        type(each) is str and each for each in value.values()
    )
    if not is_mapping or mds_path is None:
        raise ConfigError(f"{where}: {value!r:.80} found, a folder for each name is needed.")
    check_names(value, where)
    return {name: file_name(mds_path.parent / folder) for name, folder in value.items()}


def _live_weights(value: Any, mds_path: EPath | None, where: str) -> LiveWeights:
    """Return the live weights in the file that a ``weights_file`` names."""
    if not isinstance(value, str) or not value or mds_path is None:
        raise ConfigError(f"{where}: {value!r:.80} found, a path is needed.")
    path = mds_path.parent / value
    if not path.is_local():
        raise ConfigError(f"{where}: {path} found, a path on a file system is needed.")
    return LiveWeights(file_name(path))


@dataclass(kw_only=True)
class ScheduledBlend(WeightedEntries):
    """One blend node: weights are shares of rows, scheduled or constant."""

    blend: list[Union[ScheduledDatasetReference, ScheduledJoinReference]]  # noqa: UP007

    rule = BLEND


@dataclass(kw_only=True)
class Interleave(WeightedEntries):
    """One interleave node: weights are target shares of tokens, met to within a row.

    ``new_source`` sets the credit of a source that is missing from a resumed state: 0 for
    ``baseline``; with ``zero``, its share of all tokens since the start.
    """

    interleave: list[Union[ScheduledDatasetReference, ScheduledJoinReference]]  # noqa: UP007
    new_source: Literal["baseline", "zero"] = "baseline"

    rule = INTERLEAVE

    def _node(self) -> Node:
        return replace(super()._node(), new_source=self.new_source)


@dataclass(kw_only=True)
class EpochizedReference(BlendEpochizedDatasetReference, AnyDatasetReference):
    """A path with repetitions."""


@dataclass(kw_only=True)
class EpochizedBlend(MetadatasetBlendEpochized):
    """Energon's ``blend_epochized``, which may also name token files."""

    blend_epochized: list[
        Union[EpochizedReference, BlendEpochizedJoinDatasetReference]  # noqa: UP007
    ]

    def post_initialize(self, mds_path: EPath | None = None) -> None:
        for index, entry in enumerate(self.blend_epochized):
            where = f"{mds_path}: blend_epochized[{index}].repetitions"
            check_number(where, entry.repetitions, above_zero=True)
        super().post_initialize(mds_path)


@dataclass(kw_only=True)
class ScheduledMetadataset(MetadatasetV2):
    """The YAML class: ``__module__: energon_ext``, ``__class__: ScheduledMetadataset``.

    The name deliberately differs from Energon's ``MetadatasetV2``: without the plugin, Energon
    falls back to its own class of the same name and would silently drop the schedules.
    """

    splits: dict[
        str,
        Union[  # noqa: UP007
            ScheduledBlend, Interleave, EpochizedBlend, MetadatasetJoin, AnyDatasetReference
        ],
    ]
    schedule_axis: Any = None  # unit of breakpoints; set in the outermost metadataset
    skip: Any = None  # ranges of steps that are planned but not read
    exclude: Any = None  # file that lists documents not to read
    row_tokens: Any = None  # lengths of rows by schedule

    _run: RunFields = field(default_factory=RunFields, init=False)

    def post_initialize(self, mds_path: EPath | None = None) -> None:
        self._run = run_fields(
            self.schedule_axis, self.skip, self.exclude, self.row_tokens, self.path
        )
        with errors_of_energon(str(self.path)):
            super().post_initialize(mds_path)

    def get_datasets(self, *, split_part: str, **kwargs: Any) -> LoadedDatasetList:
        if split_part not in self.splits:
            has = choices(split_part, self.splits)
            raise ConfigError(f"{self.path}: no split {split_part!r}; it has {has}")
        with errors_of_energon(f"{self.path}: {split_part}"):
            loaded = super().get_datasets(split_part=split_part, **kwargs)
        parts = find_trees(loaded.datasets)
        inside = runs_of(leaf for part in parts for leaf in part.leaves)
        run = self._run.merge(inside, inside=True)
        placed = [carry(self._set_location(part, split_part, run), part.datasets) for part in parts]
        return LoadedDatasetList(blend_mode=loaded.blend_mode, datasets=sum(placed, []))

    def _set_location(self, part: CarriedTree, split_part: str, run: RunFields) -> Tree | Leaf:
        """Set the location of the outermost node of a tree, and of leaves that have none."""
        here = f"{self.path}: {split_part}"

        def place(leaf: Leaf) -> Leaf:
            return replace(leaf, where=leaf.where or here, metadataset=self.path, run=run)

        tree = map_leaves(part.tree, place)
        if isinstance(tree, Leaf) or part.factor is not None:  # the outermost node is a stock one
            return tree
        return replace(tree, node=replace(tree.node, location=f"{self.path}:{split_part}"))
