# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The one place where this package meets Energon's ``build_train_datasets``.

That method builds blending, shuffling, encoding, packing and batching in one body, and is being
rebuilt upstream. Planned sources need none of these stages. For streamed ones the override leaves
the body alone: it hands it a single pseudo-dataset, whose factory returns our blend over the real
sources, so that the stock code never has anything to blend.
"""

from typing import Any, Sequence

from megatron.energon import TaskEncoder, WorkerConfig
from megatron.energon.flavors.base_dataset import SavableDataset
from megatron.energon.metadataset.loader_interface import DatasetBlendMode, LoadedDataset
from megatron.energon.wrappers.repeat_dataset import RepeatDataset

from energon_ext.arguments import check_integer
from energon_ext.config.mix import Entry, mix_of
from energon_ext.encoders.sources import (
    BlendFactory,
    MixOfSources,
    absent_sources,
    check_unlimited,
    even_virtual_epoch,
    load_source,
    read_sources,
)
from energon_ext.errors import ConfigError
from energon_ext.mixture.checks import check_mixture
from energon_ext.mixture.tree import INTERLEAVE
from energon_ext.plan.clock import Clock
from energon_ext.plan.dataset import PassOptions, PlannedDataset
from energon_ext.plan.deal import Topology
from energon_ext.plan.row_source import RowSource
from energon_ext.splice.source import SpliceSource
from energon_ext.state.match import ENCODER
from energon_ext.streamed.blend import DynamicBlendDataset, LeastConsumedDataset, StreamedBlend
from energon_ext.streamed.samples import RepeatUpTo
from energon_ext.weights import ScheduleAxis


class DynamicBlendMixin:
    """Adds scheduled weights, and a state by source, to any TaskEncoder.

    Put it first among the base classes. Energon's own order stays: draw, shuffle, encode, pack,
    batch. With a shuffle or packing buffer, samples drawn under old weights are still in it when a
    weight changes; :class:`~energon_ext.PackedTaskEncoder` plans, and has no such lag.

    An ``interleave`` counts each sample as its ``num_tokens``, or as 1 where it has none; where an
    encoder has a method ``blend_sample_size(sample)``, as what that returns.

    Attributes:
        schedule_axis: where the run ends; its unit is the field of the metadataset.

    Example:
        >>> from megatron.energon import DefaultTaskEncoder
        >>> class MyEncoder(DynamicBlendMixin, DefaultTaskEncoder):
        ...     pass
        >>> encoder = MyEncoder()
        >>> encoder.schedule_axis = ScheduleAxis(end=5000)  # optimizer steps
    """

    schedule_axis: ScheduleAxis | None = None

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
        """Energon's method: a planned dataset, or Energon's own stages over one streamed blend."""
        whole = mix_of(datasets)
        self._prepare_entries(whole.entries)
        if not repeat:
            check_unlimited(whole.entries)
        for name in ("shuffle_buffer_size", "packing_buffer_size"):
            if (size := stages.get(name)) is not None:
                check_integer(name, size, 0)
        epochized = blend_mode is DatasetBlendMode.SAMPLE_REPETITIONS
        # Sources of a plain blend repeat one by one; an epochized blend as a whole.
        mix = read_sources(
            self, whole, worker_config=worker_config, repeat=repeat and not epochized
        )
        clock = Clock(
            whole.axis_with(self.schedule_axis),
            Topology.of(worker_config, batch_size, self.rows_per_step),
            self.tokens_per_sample,
            mix.skip,
        )
        self.check_mix(mix, clock, worker_config)
        length = even_virtual_epoch(virtual_epoch_length, worker_config)
        if mix.is_planned:
            passes = PassOptions(batches=length, repeats=repeat and epochized, restarts=not repeat)
            return self.build_plan(mix, clock, worker_config=worker_config, passes=passes)
        blend = self.build_blend(
            mix,
            clock,
            worker_config=worker_config,
            repeats=repeat and epochized,
            restarts=not repeat,
        )
        return super().build_train_datasets(  # type: ignore[misc]  # of the encoder behind
            datasets=[LoadedDataset(dataset=BlendFactory(blend))],
            worker_config=worker_config,
            batch_size=batch_size,
            blend_mode=DatasetBlendMode.NONE,
            repeat=False,
            virtual_epoch_length=length,
            **stages,
        )

    def build_source(
        self, entry: Entry, *, worker_config: WorkerConfig, repeat: bool
    ) -> SavableDataset | RowSource:
        """The samples of one source, before the draw. Override to add stages per source."""
        dataset = load_source(self, entry, worker_config)
        repetitions = entry.loaded.repetitions or 1
        if not repeat and repetitions == 1:
            return dataset
        limit, own_config = entry.max_epochs, dataset.worker_config
        if repeat:
            return RepeatUpTo(dataset, repeats=limit, restart=False, worker_config=own_config)
        return RepeatDataset(dataset, repeats=repetitions, worker_config=own_config)

    def check_mix(self, mix: MixOfSources, clock: Clock, worker_config: WorkerConfig) -> None:
        """Refuse a mixture that cannot be drawn from; warn of one that looks wrong."""
        max_epochs = {source.key: source.max_epochs for source in mix.sources}
        absent = absent_sources(mix, worker_config)
        splices = {s.key: s.rows.config for s in mix.sources if isinstance(s.rows, SpliceSource)}
        check_mixture(mix.tree, clock.axis, max_epochs, absent, splices, clock.end)

    def build_plan(
        self, mix: MixOfSources, clock: Clock, *, worker_config: WorkerConfig, passes: PassOptions
    ) -> PlannedDataset:
        """One plan over planned sources."""
        raise ConfigError(
            f"{type(self).__name__}: {mix.sources[0].key} is planned, and this TaskEncoder makes "
            f"no batches of planned rows; use an energon_ext.PackedTaskEncoder."
        )

    def build_blend(
        self, mix: MixOfSources, clock: Clock, *, worker_config: WorkerConfig, **options: Any
    ) -> StreamedBlend:
        """The draw among streamed sources."""
        own, default = (getattr(of, "blend_sample_size", None) for of in (type(self), TaskEncoder))
        if own is not default:  # that of a later Energon counts samples
            options["size_of"] = self.blend_sample_size  # type: ignore[attr-defined]
        rule = mix.tree.node.rule
        blend_class = LeastConsumedDataset if rule == INTERLEAVE else DynamicBlendDataset
        return blend_class(
            mix.sources,
            worker_config=worker_config,
            tree=mix.tree,
            clock=clock,
            fingerprint=self.state_fingerprint(),
            **options,
        )

    def state_fingerprint(self) -> dict[str, Any]:
        """JSON values that a saved state depends on; extend it with what changes your samples."""
        return {ENCODER: type(self).__qualname__}

    def _prepare_entries(self, entries: Sequence[Entry]) -> None:
        """What is checked or made before any source is built."""
        self._take_splices(entries)

    def _take_splices(self, entries: Sequence[Entry]) -> None:
        """Refuse ``splice:`` on an entry of the YAML; an encoder that splices checks it instead."""
        for entry in entries:
            if entry.splice is not None:
                raise ConfigError(
                    f"{entry.splice_where}: a {type(self).__name__} splices nothing; use an "
                    f"energon_ext.PackedTaskEncoder, or leave it out."
                )
