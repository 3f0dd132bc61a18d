# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The one place where this package meets Energon's ``build_train_datasets``.

That method builds blending, shuffling, encoding, packing and batching in one body, and is being
rebuilt upstream. The override here leaves the body alone: it hands it a single pseudo-dataset whose
factory builds our blend over the real sources, so the stock code never comes to blend anything.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Any, Callable, Sequence

from megatron.energon import WorkerConfig
from megatron.energon.flavors.base_dataset import BaseCoreDatasetFactory, SavableDataset
from megatron.energon.metadataset.loader_interface import DatasetBlendMode, LoadedDataset
from megatron.energon.wrappers.repeat_dataset import RepeatDataset

from energon_ext.config.source_key import (
    get_origin,
    global_workers,
    max_epochs_of,
    order_name,
    source_identities,
    source_keys,
    stable_hash,
    worker_config_for,
)
from energon_ext.documents.tar_memory import forget_read_members
from energon_ext.errors import ConfigError
from energon_ext.mixture.checks import check_blend
from energon_ext.mixture.choice import ChoiceDataset, Source
from energon_ext.weights import (
    ConstantWeight,
    ScheduleAxis,
    as_weight,
)

logger = logging.getLogger(__name__)

#: ``(loaded dataset, its key) -> the dataset of that source``
SourceBuilder = Callable[[LoadedDataset, str], SavableDataset]


@dataclass(frozen=True)
class ScheduleLag:
    """Batches of a rank by which the effect of a weight trails its knot.

    Attributes:
        packing_batches: samples wait for so long in the packing buffer, if each becomes one packed
            sample; divide by the samples per pack.
        shuffle_batches: after so many, 99 % of what was in the shuffle buffer has left it.
    """

    packing_batches: int
    shuffle_batches: int


class SourcesFactory(BaseCoreDatasetFactory):
    """Looks like one dataset to Energon; builds the blend of all of them.

    Args:
        documents: samples in one epoch of all sources.
        build: makes the blend.
    """

    # No sample type: Energon asks only whether samples are crude, which the sources answer.
    __sample_type__ = None

    def __init__(self, documents: int, build: Callable[[], SavableDataset]):
        self.paths = []
        self.subflavors = {}
        self._documents = documents
        self._build = build

    def __len__(self) -> int:
        return self._documents

    def build(self, worker_rotation_offset: int = 0) -> SavableDataset:
        return self._build()

    def as_file_store(self):
        raise NotImplementedError("A blend of sources is not a file store.")


class DynamicBlendMixin:
    """Teaches any TaskEncoder scheduled weights and a state that belongs to the sources.

    Put it first among the base classes. Energon's own order stays: choose, shuffle, encode, pack,
    batch. With a shuffle or packing buffer, samples chosen under old weights are still in it when a
    weight changes; :class:`~energon_ext.PackedTaskEncoder` chooses last and has no such lag.

    Attributes:
        schedule_axis: what the knots of the schedules count; batches of a rank by default. The
            launch script sets it, since it knows micro-batches and ranks.

    Example:
        >>> from megatron.energon import DefaultTaskEncoder
        >>> class MyEncoder(DynamicBlendMixin, DefaultTaskEncoder):
        ...     pass
        >>> encoder = MyEncoder()
        >>> encoder.schedule_axis = ScheduleAxis.steps(batches_per_step=8)
    """

    schedule_axis: ScheduleAxis = ScheduleAxis()

    #: Tokens of a sample that the choice hands out, where all have about as many; else 0.
    tokens_per_sample: int = 0

    def build_train_datasets(
        self,
        *,
        datasets: list[LoadedDataset],
        worker_config: WorkerConfig,
        blend_mode: DatasetBlendMode = DatasetBlendMode.NONE,
        repeat: bool = True,
        virtual_epoch_length: int = 0,
        **stages: Any,
    ) -> SavableDataset:
        """Energon's method, with the sources replaced by one blend of ours."""
        check_virtual_epoch(virtual_epoch_length, worker_config)
        if not repeat:
            check_uncapped(datasets)
        self._report_lag(datasets, worker_config, stages)
        epochized = blend_mode is DatasetBlendMode.SAMPLE_REPETITIONS
        sources = collapse_sources(
            datasets,
            lambda loaded, key: self.build_source(
                loaded, key, worker_config=worker_config, repeat=repeat and not epochized
            ),
            self.build_blend,
            worker_config=worker_config,
        )
        return super().build_train_datasets(
            datasets=[sources],
            worker_config=worker_config,
            blend_mode=DatasetBlendMode.NONE,
            # Sources of a plain blend repeat one by one; an epochized blend repeats as a whole.
            repeat=repeat and epochized,
            virtual_epoch_length=virtual_epoch_length,
            **stages,
        )

    def build_source(
        self, loaded: LoadedDataset, key: str, *, worker_config: WorkerConfig, repeat: bool
    ) -> SavableDataset:
        """The samples of one source, before the choice. Override to add stages per source."""
        dataset = load_source(self, loaded, key, worker_config)
        if not repeat and (loaded.repetitions or 1) == 1:
            return dataset
        cap = max_epochs_of(loaded.dataset)
        return RepeatDataset(
            dataset,
            repeats=cap if repeat else loaded.repetitions,
            # A source that has reached its cap stays at its end, also over a save.
            restart=not repeat or cap is None,
            worker_config=dataset.worker_config,
        )

    def build_blend(
        self, sources: Sequence[Source], *, worker_config: WorkerConfig
    ) -> ChoiceDataset:
        """The choice among the sources."""
        check_blend(sources, self.schedule_axis, worker_config)
        return ChoiceDataset(
            sources,
            axis=self.schedule_axis,
            sample_tokens=self.tokens_per_sample,
            worker_config=worker_config,
            fingerprint=self.state_fingerprint(),
        )

    def state_fingerprint(self) -> dict[str, Any]:
        """JSON values that a saved state depends on; extend it with what changes your samples."""
        return {"task_encoder": type(self).__qualname__}

    def schedule_lag(
        self,
        *,
        batch_size: int | None,
        shuffle_buffer_size: int | None = None,
        packing_buffer_size: int | None = None,
        num_workers: int = 0,
        samples_per_pack: float = 1.0,
    ) -> ScheduleLag:
        """How many batches after a knot old samples still come, with buffers behind the choice."""
        samples_per_batch = (batch_size or 1) * samples_per_pack
        batches_per_sample = max(1, num_workers) / samples_per_batch
        return ScheduleLag(
            packing_batches=math.ceil((packing_buffer_size or 0) * batches_per_sample),
            # Each draw empties one of n places, so a sample stays with probability (1 - 1/n)^draws.
            shuffle_batches=math.ceil(
                (shuffle_buffer_size or 0) * math.log(100) * batches_per_sample
            ),
        )

    def _report_lag(
        self, datasets: list[LoadedDataset], worker_config: WorkerConfig, stages: dict[str, Any]
    ) -> None:
        scheduled = any(as_weight(loaded.weight).is_scheduled for loaded in datasets)
        lag = self.schedule_lag(
            batch_size=stages.get("batch_size"),
            shuffle_buffer_size=stages.get("shuffle_buffer_size"),
            packing_buffer_size=stages.get("packing_buffer_size"),
            num_workers=worker_config.num_workers,
        )
        if scheduled and (lag.packing_batches or lag.shuffle_batches):
            logger.info(
                "Weights act on the choice, and buffers lie behind it: a step shows about %d "
                "batches later (packing buffer; a schedule_axis with lookahead_batches makes up "
                "for it), and 99%% of the samples in the shuffle buffer are gone after %d more. "
                "PackedTaskEncoder has no such lag.",
                lag.packing_batches,
                lag.shuffle_batches,
            )


def load_source(
    task_encoder: Any, loaded: LoadedDataset, key: str, worker_config: WorkerConfig
) -> SavableDataset:
    """The raw (or cooked) samples of one source, in an order of its own.

    Which worker gets the odd sample out rotates with its name, so that it depends neither on the
    order of the sources nor on their number.
    """
    name = order_name(key, loaded.dataset)
    own_config = worker_config_for(worker_config, name)
    # Energon built the factory for all sources alike; random numbers come from its configuration.
    loaded.dataset.worker_config = own_config
    rotation = stable_hash(name) % global_workers(worker_config)
    dataset = task_encoder._load_dataset(loaded, rotation, worker_config=own_config)
    forget_read_members(dataset)
    return dataset


def collapse_sources(
    datasets: Sequence[LoadedDataset],
    build_source: SourceBuilder,
    build_blend: Callable[..., SavableDataset],
    *,
    worker_config: WorkerConfig,
) -> LoadedDataset:
    """Many loaded datasets as one whose factory builds the blend.

    Raises:
        ConfigError: no dataset, or one without a sample.
    """
    if not datasets:
        raise ConfigError("The metadataset names no source; list at least one.")
    factories = [loaded.dataset for loaded in datasets]
    keys, identities = source_keys(factories), source_identities(factories)
    for key, loaded in zip(keys, datasets):
        if len(loaded.dataset) == 0:
            origin = get_origin(loaded.dataset)
            place = f" ({origin.where})" if origin else ""
            raise ConfigError(
                f"Source {key}{place} has no samples; prepare it again or leave it out."
            )

    def build() -> SavableDataset:
        sources = [
            Source(
                key=key,
                dataset=build_source(loaded, key),
                weight=_weight_of(loaded),
                documents=len(loaded.dataset),
                max_epochs=max_epochs_of(loaded.dataset),
                identity=identity,
                order=order_name(key, loaded.dataset),
            )
            for key, identity, loaded in zip(keys, identities, datasets)
        ]
        return build_blend(sources, worker_config=worker_config)

    return LoadedDataset(
        dataset=SourcesFactory(sum(len(loaded.dataset) for loaded in datasets), build)
    )


def check_uncapped(datasets: Sequence[LoadedDataset]) -> None:
    """Refuse a cap on the epochs of a source where every source is read once anyway."""
    for loaded in datasets:
        cap = max_epochs_of(loaded.dataset)
        if cap is not None:
            raise ConfigError(
                f"{get_origin(loaded.dataset).where}.max_epochs: {cap} with repeat=False, which "
                f"reads every source once; leave out one of the two."
            )


def check_virtual_epoch(virtual_epoch_length: int, worker_config: WorkerConfig) -> None:
    """Refuse a virtual epoch that workers would leave at different batch indices."""
    if virtual_epoch_length % max(1, worker_config.num_workers):
        raise ConfigError(
            f"virtual_epoch_length={virtual_epoch_length} is not a multiple of num_workers="
            f"{worker_config.num_workers}; workers would drift apart and with them the batch "
            f"index. Use a multiple."
        )


def _weight_of(loaded: LoadedDataset):
    if loaded.repetitions is not None:
        return ConstantWeight(len(loaded.dataset) * loaded.repetitions)
    return as_weight(loaded.weight)
