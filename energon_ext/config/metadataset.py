# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""A metadataset whose blend weights may be schedules.

Everything but the weights is Energon's: references, nesting, joins, splits, subsets and preparation
are inherited. A constant blend loads as the plain floats that stock Energon makes; a scheduled one
carries its specs in :class:`~energon_ext.weights.ScheduledFloat`, which any TaskEncoder with
:class:`~energon_ext.encoders.mixin.DynamicBlendMixin` understands and any other refuses.
"""

# No `from __future__ import annotations` and no `A | B` in fields here: Energon's parser reads the
# annotations, and knows types and typing.Union only.
from dataclasses import dataclass, field
from typing import Any, Union

from megatron.energon import WorkerConfig
from megatron.energon.epathlib import EPath
from megatron.energon.flavors.webdataset.structs import DatasetSubset
from megatron.energon.metadataset.loader_interface import (
    DatasetBlendMode,
    DatasetLoaderInterface,
    LoadedDataset,
    LoadedDatasetList,
    TraversedDatasetReference,
)
from megatron.energon.metadataset.metadataset_v2 import (
    BlendEpochizedDatasetReference,
    BlendEpochizedJoinDatasetReference,
    DatasetReference,
    MetadatasetBlend,
    MetadatasetBlendEpochized,
    MetadatasetJoin,
    MetadatasetV2,
)

from energon_ext.config.source_key import Origin, set_origin
from energon_ext.documents.token_file import is_token_file
from energon_ext.documents.token_file_factory import TokenFileFactory
from energon_ext.errors import ConfigError
from energon_ext.mixture.choosers import NEW_SOURCES
from energon_ext.weights import (
    ScheduledFloat,
    WeightGroup,
    WeightSpec,
    as_weight,
    compose_weights,
    weight_from_config,
)
from energon_ext.weights.compose import INTERLEAVE, is_interleaved


@dataclass
class ScheduledEntryMixin:
    """What an entry says beside what is read.

    Attributes:
        weight: a number or a schedule.
        max_epochs: most passes over each source of the entry, None for no limit.
    """

    weight: Any = 1.0
    max_epochs: Any = None


@dataclass
class TokenFileLoader(DatasetLoaderInterface):
    """What a reference to a ``.bin``/``.idx`` pair loads."""

    path: EPath

    def post_initialize(self, mds_path: EPath | None = None) -> None:
        pass

    def traverse(self, mds_path: EPath | None = None, *, split_part: str, **kwargs: Any) -> list:
        subflavors = kwargs.get("_subflavors") or {}
        return [TraversedDatasetReference(self.path, split_part, {}, subflavors)]

    def get_datasets(
        self,
        *,
        training: bool,
        worker_config: WorkerConfig,
        subflavors: dict[str, Any] | None = None,
        subset: DatasetSubset | None = None,
        shuffle_over_epochs_multiplier: int | None = 1,
        **kwargs: Any,
    ) -> LoadedDatasetList:
        if shuffle_over_epochs_multiplier not in (1, None):
            raise ConfigError(
                f"{self.path}: shuffle_over_epochs_multiplier is for webdatasets; every epoch of a "
                f"token file has an order of its own."
            )
        factory = TokenFileFactory(
            self.path,
            training=training,
            worker_config=worker_config,
            subflavors=subflavors,
            subset=subset,
        )
        return LoadedDatasetList(datasets=[LoadedDataset(dataset=factory)])


@dataclass(kw_only=True)
class AnyDatasetReference(DatasetReference):
    """A path to anything: a prepared folder, JSONL, a metadataset, or a token file."""

    def post_initialize(self, mds_path: EPath | None = None) -> None:
        path = self._resolve_path(mds_path)
        if is_token_file(path):
            self._dataset = TokenFileLoader(path)
        else:
            super().post_initialize(mds_path)


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

    _specs: list[WeightSpec] = field(default_factory=list, init=False)
    _where: str = field(default="", init=False)
    _root: EPath = field(default=None, init=False)

    def post_initialize(self, mds_path: EPath | None = None) -> None:
        self._where = str(mds_path)
        self._root = mds_path.parent
        if not self.blend:
            raise ConfigError(f"{mds_path}: an empty `{self._name}`; list at least one source.")
        self._specs = [
            weight_from_config(entry.weight, f"{self._entry_name(index)}.weight")
            for index, entry in enumerate(self.blend)
        ]
        for index, entry in enumerate(self.blend):
            _check_max_epochs(entry.max_epochs, self._entry_name(index))
        super().post_initialize(mds_path)

    def get_datasets(
        self, *, subset: DatasetSubset | None = None, **kwargs: Any
    ) -> LoadedDatasetList:
        subset = self._get_subset(subset)
        group = self._group()
        datasets: list[LoadedDataset] = []
        for index, entry in enumerate(self.blend):
            share = group.share(index, f"{self._entry_name(index)}.weight")
            origin = Origin(self._root, self._entry_name(index), entry.max_epochs)
            inner = entry.get_datasets(subset=subset, **kwargs)
            if inner.blend_mode is DatasetBlendMode.SAMPLE_REPETITIONS:
                raise ConfigError(
                    f"{self._entry_name(index)}: a `blend_epochized` cannot be an entry of a "
                    f"`{self._name}`; use `blend_epochized` on both levels, or on none."
                )
            for loaded in inner.datasets:
                spec = compose_weights(
                    share,
                    as_weight(loaded.weight),
                    allow_nested_schedules=self.allow_nested_schedules,
                )
                loaded.weight = _transport(spec)
                set_origin(loaded.dataset, origin)
                datasets.append(loaded)
        return LoadedDatasetList(blend_mode=DatasetBlendMode.DATASET_WEIGHT, datasets=datasets)

    def _group(self) -> WeightGroup:
        return WeightGroup(self._specs)

    @property
    def _name(self) -> str:
        return "blend"

    def _entry_name(self, index: int) -> str:
        return (
            f"{self._where}: {self._name}[{index}] ({getattr(self.blend[index], 'path', 'join')})"
        )


@dataclass(kw_only=True)
class Interleave(ScheduledBlend):
    """One interleave node: weights are target shares of tokens, kept exactly.

    Attributes:
        new_source: where a source starts that a resumed state does not know: ``baseline``, level
            with the source that is furthest behind, or ``zero``.
    """

    interleave: list[Union[ScheduledDatasetReference, ScheduledJoinReference]]  # noqa: UP007
    new_source: str = "baseline"

    #: What the inherited methods call the entries.
    blend: list = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.blend = self.interleave

    def post_initialize(self, mds_path: EPath | None = None) -> None:
        if self.new_source not in NEW_SOURCES:
            raise ConfigError(
                f"{mds_path}: new_source: {self.new_source!r} found, {' or '.join(NEW_SOURCES)}."
            )
        super().post_initialize(mds_path)

    def _group(self) -> WeightGroup:
        return WeightGroup(self._specs, rule=INTERLEAVE, new_source=self.new_source)

    @property
    def _name(self) -> str:
        return "interleave"


@dataclass(kw_only=True)
class UncappedEpochizedReference(BlendEpochizedDatasetReference):
    """A path with repetitions, which leave nothing for a cap to say."""

    max_epochs: Any = None


@dataclass(kw_only=True)
class UncappedBlendEpochized(MetadatasetBlendEpochized):
    """Energon's ``blend_epochized``, which says so where a cap is asked of it."""

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


def _check_max_epochs(value: Any, entry: str) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ConfigError(
            f"{entry}.max_epochs: {value!r} found, an integer >= 1 is needed; leave it out for no "
            f"limit, or the entry for no epoch at all."
        )


def _transport(spec: WeightSpec) -> float:
    """A plain float where stock Energon would have one, else one that carries the spec."""
    plain = not spec.knots() and spec.evaluate(0) > 0 and not is_interleaved(spec)
    return spec.evaluate(0) if plain else ScheduledFloat(spec)


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
            ScheduledBlend,
            Interleave,
            UncappedBlendEpochized,
            MetadatasetJoin,
            AnyDatasetReference,
        ],
    ]

    def get_datasets(self, *, split_part: str, **kwargs: Any) -> LoadedDatasetList:
        if split_part not in self.splits:
            raise ConfigError(
                f"{self.path}: no split {split_part!r}; it has {', '.join(self.splits)}."
            )
        loaded = super().get_datasets(split_part=split_part, **kwargs)
        for dataset in loaded.datasets:
            set_origin(dataset.dataset, Origin(self.path.parent, f"{self.path}: {split_part}"))
        return loaded
