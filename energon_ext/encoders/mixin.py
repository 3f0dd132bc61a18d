# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The one place where this package meets Energon's ``build_train_datasets``.

That method builds blending, shuffling, encoding, packing and batching in one body, and is being
rebuilt upstream. The override here leaves the body alone: it hands it a single pseudo-dataset whose
factory builds our blend over the real sources, so the stock code never comes to blend anything.
"""

import logging
import math
from dataclasses import dataclass
from typing import Any, Sequence

from megatron.energon import TaskEncoder, WorkerConfig
from megatron.energon.flavors.base_dataset import SavableDataset
from megatron.energon.metadataset.loader_interface import DatasetBlendMode, LoadedDataset
from megatron.energon.wrappers.repeat_dataset import RepeatDataset

from energon_ext.arguments import check_integer
from energon_ext.config.source_key import get_origin
from energon_ext.encoders.sources import (
    absent_sources,
    check_unlimited,
    collapse_sources,
    even_virtual_epoch,
    load_source,
)
from energon_ext.errors import ConfigError
from energon_ext.mixture.checks import check_mixture
from energon_ext.mixture.tree import INTERLEAVE, Tree, path_of
from energon_ext.plan.blends import DynamicBlendDataset, LeastConsumedDataset
from energon_ext.plan.dataset import BlendedDataset
from energon_ext.plan.deal import Topology
from energon_ext.plan.row_source import RowSource
from energon_ext.plan.source import Source
from energon_ext.plan.streamed import RepeatUpTo
from energon_ext.splice.source import SpliceSource
from energon_ext.state.match import ENCODER
from energon_ext.weights import ScheduleAxis

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ScheduleLag:
    """Batches of a rank by which the effect of a weight trails its breakpoint."""

    packing_batches: int  # in the packing buffer; divide by the samples per packed sample
    shuffle_batches: int  # until 99 % of what was in the shuffle buffer has left it


class DynamicBlendMixin:
    """Teaches any TaskEncoder scheduled weights and a state that belongs to the sources.

    Put it first among the base classes. Energon's own order stays: draw, shuffle, encode, pack,
    batch. With a shuffle or packing buffer, samples drawn under old weights are still in it when a
    weight changes; :class:`~energon_ext.PackedTaskEncoder` draws last and has no such lag.

    An encoder that has a ``blend_sample_size(sample)`` says with it what an ``interleave`` of its
    samples counts; else each counts as 1, or as its ``num_tokens``.

    Attributes:
        schedule_axis: what the breakpoints of the schedules count; steps by default.

    Example:
        >>> from megatron.energon import DefaultTaskEncoder
        >>> class MyEncoder(DynamicBlendMixin, DefaultTaskEncoder):
        ...     pass
        >>> encoder = MyEncoder()
        >>> encoder.schedule_axis = ScheduleAxis("batches")
    """

    schedule_axis: ScheduleAxis = ScheduleAxis()

    #: Positions of a row that the blend hands out, where all have as many; else 0.
    tokens_per_sample: int = 0

    #: Rows of a global batch; one batch of each rank where it is None.
    rows_per_step: int | None = None

    def build_train_datasets(
        self,
        *,
        datasets: list[LoadedDataset],
        worker_config: WorkerConfig,
        batch_size: int | None = None,
        blend_mode: DatasetBlendMode = DatasetBlendMode.NONE,
        repeat: bool = True,
        virtual_epoch_length: int = 0,
        **stages: Any,
    ) -> SavableDataset:
        """Energon's method, with the sources replaced by one blend of ours."""
        self._take_splices(datasets)
        if not repeat:
            check_unlimited(datasets)
        names = ("shuffle_buffer_size", "packing_buffer_size")
        buffers: dict[str, Any] = {name: stages.get(name) for name in names}
        for name, size in buffers.items():
            if size is not None:  # one for all sources, and not one for each group
                check_integer(name, size, 0)
        num_workers = worker_config.num_workers
        lag = self.schedule_lag(batch_size=batch_size, num_workers=num_workers, **buffers)
        _report_lag(datasets, lag)
        epochized = blend_mode is DatasetBlendMode.SAMPLE_REPETITIONS
        # Sources of a plain blend repeat one by one; an epochized blend as a whole.
        sources = collapse_sources(
            self,
            datasets,
            worker_config=worker_config,
            repeat=repeat and not epochized,
            topology=Topology.of(worker_config, batch_size, self.rows_per_step),
            restarts=not repeat,
            repeats=repeat and epochized,
        )
        return super().build_train_datasets(  # type: ignore[misc]  # of the encoder behind
            datasets=[sources],
            worker_config=worker_config,
            batch_size=batch_size,
            blend_mode=DatasetBlendMode.NONE,
            repeat=False,
            virtual_epoch_length=even_virtual_epoch(virtual_epoch_length, worker_config),
            **stages,
        )

    def build_source(
        self, loaded: LoadedDataset, key: str, *, worker_config: WorkerConfig, repeat: bool
    ) -> SavableDataset | RowSource:
        """The samples of one source, before the draw. Override to add stages per source."""
        dataset = load_source(self, loaded, key, worker_config)
        if not repeat and (loaded.repetitions or 1) == 1:
            return dataset
        limit = get_origin(loaded.dataset).max_epochs
        own_config = dataset.worker_config
        if repeat:
            return RepeatUpTo(dataset, repeats=limit, restart=False, worker_config=own_config)
        return RepeatDataset(dataset, repeats=loaded.repetitions, worker_config=own_config)

    def build_blend(
        self, sources: Sequence[Source], tree: Tree, *, worker_config: WorkerConfig, **options: Any
    ) -> BlendedDataset:
        """The draw among the sources."""
        own, default = (getattr(of, "blend_sample_size", None) for of in (type(self), TaskEncoder))
        if own is not default:  # that of a later Energon counts samples
            for rows in filter(None, (source.streamed for source in sources)):
                rows.size_of = getattr(self, "blend_sample_size")  # noqa: B009
        max_epochs = {source.key: source.max_epochs for source in sources}
        absent = absent_sources(sources, worker_config)
        splices = {s.key: s.rows.config for s in sources if isinstance(s.rows, SpliceSource)}
        check_mixture(tree, self.schedule_axis, max_epochs, absent, splices)
        blend_class = LeastConsumedDataset if tree.node.rule == INTERLEAVE else DynamicBlendDataset
        return blend_class(
            sources,
            tree=tree,
            axis=self.schedule_axis,
            row_tokens=self.tokens_per_sample,
            worker_config=worker_config,
            fingerprint=self.state_fingerprint(),
            **options,
        )

    def state_fingerprint(self) -> dict[str, Any]:
        """JSON values that a saved state depends on; extend it with what changes your samples."""
        return {ENCODER: type(self).__qualname__}

    def schedule_lag(
        self,
        *,
        batch_size: int | None,
        shuffle_buffer_size: int | None = None,
        packing_buffer_size: int | None = None,
        num_workers: int = 0,
        samples_per_pack: float = 1.0,
    ) -> ScheduleLag:
        """How many batches after a breakpoint old samples come, with buffers behind the draw."""
        samples_per_batch = (batch_size or 1) * samples_per_pack
        batches_per_sample = max(1, num_workers) / samples_per_batch
        return ScheduleLag(
            packing_batches=math.ceil((packing_buffer_size or 0) * batches_per_sample),
            # Each draw empties one of n places, so a sample stays with probability (1 - 1/n)^draws.
            shuffle_batches=math.ceil(
                (shuffle_buffer_size or 0) * math.log(100) * batches_per_sample
            ),
        )

    def _take_splices(self, datasets: Sequence[LoadedDataset]) -> None:
        """Refuse ``splice:`` on an entry of the YAML; an encoder that splices checks it instead."""
        for origin in (get_origin(loaded.dataset) for loaded in datasets):
            if origin.splice is not None:
                raise ConfigError(
                    f"{origin.splice_where}: a {type(self).__name__} splices nothing; use an "
                    f"energon_ext.PackedTaskEncoder, or leave it out."
                )


def _report_lag(datasets: Sequence[LoadedDataset], lag: ScheduleLag) -> None:
    scheduled = any(
        isinstance(step, tuple) and step[0].weights[step[1]].is_scheduled
        for loaded in datasets
        for step in path_of(loaded.weight)
    )
    if scheduled and (lag.packing_batches or lag.shuffle_batches):
        logger.info(
            "Weights act on the draw, and buffers lie behind it: a breakpoint shows about %d "
            "batches later (packing buffer; a schedule_axis with lookahead makes up for it), "
            "and 99%% of the samples in the shuffle buffer are gone after %d more. "
            "PackedTaskEncoder has no such lag.",
            lag.packing_batches,
            lag.shuffle_batches,
        )
