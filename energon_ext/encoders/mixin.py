# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The only override of Energon's ``build_train_datasets``.

Energon's method blends, shuffles, encodes, packs and batches in one body. Planned sources need none
of these stages. For streamed sources the override passes a single pseudo-dataset to Energon's
method, whose factory returns our blend of the real sources, so that Energon has nothing to blend.
"""

from dataclasses import replace
from typing import Any, Mapping, Sequence, cast

from megatron.energon import TaskEncoder, WorkerConfig
from megatron.energon.flavors.base_dataset import SavableDataset
from megatron.energon.metadataset.loader_interface import DatasetBlendMode, LoadedDataset

from energon_ext.arguments import check_integer
from energon_ext.config.mix import Entry, Mix, mix_of
from energon_ext.encoders.plan_mix import Passes, check_blend, plan_mix
from energon_ext.encoders.planned_mixin import PlannedMixin
from energon_ext.encoders.planned_samples import reason_to_stream
from energon_ext.encoders.sources import (
    absent_sources,
    check_fields,
    check_unlimited,
    even_virtual_epoch,
    stream_source,
)
from energon_ext.encoders.splicing import find_pad_id
from energon_ext.encoders.streamed_mixin import StreamedMixin
from energon_ext.errors import ConfigError, log_of
from energon_ext.loader.planned_dataset import PlannedDataset
from energon_ext.plan.clock import Clock
from energon_ext.plan.length import check_all_rows_are_read
from energon_ext.plan.lookup import STREAMED
from energon_ext.plan.topology import Topology
from energon_ext.samples.methods import can_pack
from energon_ext.streamed.spread import line_up
from energon_ext.weights import ScheduleAxis

logger = log_of(__name__)


class DynamicBlendMixin(PlannedMixin, StreamedMixin):
    """Adds scheduled weights and per-source state to any TaskEncoder.

    Put it first among the base classes. If ``encode_sample`` is stateless, samples are planned by
    number: a run continues exactly with any ranks and workers, and an ``interleave`` counts each
    sample as 1. The random numbers of a sample depend on the seed and on its source, number and
    epoch. A sample that cannot be used is replaced by another one of its source.

    Otherwise, or with a ``packing_buffer_size``, samples are streamed in Energon's own order: draw,
    shuffle, encode, pack, batch. When a weight changes, the buffers still contain samples drawn
    under the old weights. An ``interleave`` counts a sample as its ``num_tokens``, or as 1 if it
    has none, unless the encoder has a method ``blend_sample_size(sample)``. The log gives the
    reason for streaming.

    Attributes:
        schedule_axis: end of the run, in the unit of the metadataset's ``schedule_axis``.

    Example:
        >>> from megatron.energon import DefaultTaskEncoder
        >>> class MyEncoder(DynamicBlendMixin, DefaultTaskEncoder):
        ...     pass
        >>> encoder = MyEncoder()
        >>> encoder.schedule_axis = ScheduleAxis(end=5000)  # optimizer steps
    """

    schedule_axis: ScheduleAxis | None = None

    #: Whether to plan samples by number if the encoder allows it.
    plan_samples: bool = True

    #: Rows of a global batch; None for one batch per rank.
    rows_per_step: int | None = None

    def __init_subclass__(cls, **options: Any) -> None:
        """Let an attribute of another base class win over the default here, in any order."""
        super().__init_subclass__(**options)
        defaults = DynamicBlendMixin, PlannedMixin
        for name in {*DynamicBlendMixin.__annotations__, *PlannedMixin.__annotations__}:
            owners = [each for each in cls.__mro__ if name in vars(each)]
            others = [each for each in owners if each not in defaults]
            if others and owners[0] in defaults:
                setattr(cls, name, vars(others[0])[name])

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
        """Build a plan, or Energon's own stages over one streamed blend."""
        for name in ("shuffle_buffer_size", "packing_buffer_size"):
            if (size := stages.get(name)) is not None:
                check_integer(name, size, 0)
        mix = mix_of(datasets)
        if not repeat:
            check_unlimited(mix.entries)
        # Sources of a plain blend repeat separately; an epochized blend repeats as a whole.
        passes = Passes(
            repeat=repeat,
            as_whole=blend_mode is DatasetBlendMode.SAMPLE_REPETITIONS,
            batches=even_virtual_epoch(virtual_epoch_length, worker_config),
        )
        topology = Topology.of(worker_config, stages.get("batch_size"), self.rows_per_step)
        is_complete = repeat or self.make_padding is not None
        reason = self._find_reason_to_stream(mix.entries, stages, is_complete)
        if reason is None:
            return self._plan(mix, topology, passes, worker_config)
        sources = [
            stream_source(
                entry,
                self.build_streamed_source(
                    entry, worker_config=worker_config, repeat=passes.repeats_sources
                ),
            )
            for entry in mix.entries
        ]
        line_up(sources)
        end, skip = self.schedule_axis, mix.run.skip.ranges
        clock = Clock(mix.axis_with(end), topology, self.tokens_per_sample, skip)
        check_blend(mix, sources, clock, absent_sources(sources, worker_config))
        settings = self.spec(mix.entries, worker_config.seed_offset).compared()
        del settings["seed"]
        return self.build_streamed_blend(
            sources,
            {
                "pass_batches": passes.batches,
                "repeats": repeat and passes.as_whole,
                "restarts": not repeat,
            },
            stages,
            tree=mix.tree,
            clock=clock,
            worker_config=worker_config,
            fingerprint=settings,
        )

    def _plan(
        self, mix: Mix, topology: Topology, passes: Passes, worker_config: WorkerConfig
    ) -> PlannedDataset:
        """Return a dataset that reads the planned rows of a mix."""
        spec = self.spec(mix.entries, worker_config.seed_offset)
        spec = replace(spec, repeat=passes.repeat)
        self._check_cost(spec.row_tokens, "the encoder has no length_of")
        columns = self.open_columns(mix.entries, passes.validating)
        live = self.make_live(spec)
        run = plan_mix(mix, spec, topology, columns, live, passes, self.schedule_axis)
        return self._make_dataset(run, find_pad_id(mix.entries, spec), worker_config)

    def _find_reason_to_stream(
        self, entries: Sequence[Entry], stages: Mapping[str, Any], is_complete: bool
    ) -> str | None:
        """Check the entries; return and log why samples must be streamed, None if planned."""
        self._check_entries(entries)
        reason = self._reason_to_stream(entries, stages, is_complete)
        if reason is not None:
            logger.info("Samples are streamed, which fixes the ranks x workers: %s.", reason)
            self._check_cost(0, reason)
        return reason

    def _check_cost(self, row_tokens: int, reason: str) -> None:
        if self.cost is not None and not row_tokens:
            raise ConfigError(
                f"{type(self).__qualname__}.cost: needs planned rows of samples with lengths; "
                f"{reason}."
            )

    def build_val_datasets(
        self,
        *,
        datasets: list[LoadedDataset],
        worker_config: WorkerConfig,
        batch_size: int,
        limit: int | None = None,
        **stages: Any,
    ) -> SavableDataset:
        """Read each source once and in order; leave streamed sources to Energon's own method.

        Raises:
            ConfigError: some rows do not fill a batch on every rank, and nothing completes it.
        """
        mix, options = mix_of(datasets), {**stages, "batch_size": batch_size}
        # Without padding, packed samples are planned and refused if some rows would be left over.
        is_complete = self.make_padding is not None or can_pack(cast(TaskEncoder, self))
        if self._find_reason_to_stream(mix.entries, options, is_complete) is not None:
            built = super().build_val_datasets(  # type: ignore[misc]  # of the next base class
                datasets=datasets, worker_config=worker_config, limit=limit, **options
            )
            setattr(built, STREAMED, True)
            return cast(SavableDataset, built)
        passes = Passes(repeat=False, validating=True, batches=limit or 0)
        topology = Topology.of(worker_config, batch_size, None)
        dataset = self._plan(mix, topology, passes, worker_config)
        check_all_rows_are_read(dataset.run, type(self).__qualname__)
        return dataset

    def _check_entries(self, entries: Sequence[Entry]) -> None:
        encoder = cast(TaskEncoder, self)
        check_fields(encoder, entries)

    def _reason_to_stream(
        self, entries: Sequence[Entry], stages: Mapping[str, Any], is_complete: bool
    ) -> str | None:
        """Return why samples must be streamed; None if they are planned."""
        if not self.plan_samples:
            return "plan_samples is False"
        for name in ("build_streamed_source", "build_streamed_blend"):
            if getattr(type(self), name) is not getattr(DynamicBlendMixin, name):
                return f"the encoder overrides {name}"
        if self._sizes_samples():
            return "blend_sample_size needs samples that have been read"
        encoder = cast(TaskEncoder, self)
        return reason_to_stream(encoder, entries, stages, is_complete)
