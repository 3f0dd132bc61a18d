# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The one place where this package meets Energon's ``build_train_datasets``.

That method builds blending, shuffling, encoding, packing and batching in one body. Planned sources
need none of these stages. For streamed ones the override hands the body a single pseudo-dataset,
whose factory returns our blend over the real sources, so that it never has anything to blend.
"""

import copy
from collections.abc import Callable
from types import MappingProxyType
from typing import Any, Mapping, Sequence

from megatron.energon import TaskEncoder, WorkerConfig
from megatron.energon.flavors.base_dataset import SavableDataset
from megatron.energon.metadataset.loader_interface import DatasetBlendMode, LoadedDataset

from energon_ext.arguments import check_integer
from energon_ext.batch.rows import Row
from energon_ext.config.mix import Entry, mix_of
from energon_ext.config.references import TokenFileFactory
from energon_ext.encoders.measured import ensure_measured
from energon_ext.encoders.planned_samples import (
    obstacle,
    packer_of,
    packs_samples,
    sample_rows,
    saved_samples,
    token_rows,
)
from energon_ext.encoders.sources import (
    absent_sources,
    check_omissions,
    check_unlimited,
    even_virtual_epoch,
    load_source,
    open_live_weights,
    read_sources,
    refuse_splices,
)
from energon_ext.errors import ConfigError, log_of
from energon_ext.mixture.checks import check_mixture
from energon_ext.mixture.tree import IN_ORDER, INTERLEAVE, blend_of
from energon_ext.plan.clock import Clock
from energon_ext.plan.cost import Cost
from energon_ext.plan.dataset import BatchOptions, PassOptions, PlannedDataset
from energon_ext.plan.deal import Topology
from energon_ext.plan.source import Source
from energon_ext.prepare.lengths import LengthTable
from energon_ext.splice.source import SpliceSource
from energon_ext.state.match import ENCODER
from energon_ext.streamed.blend import DynamicBlendDataset, LeastConsumedDataset
from energon_ext.weights import ConstantWeight, ScheduleAxis

logger = log_of(__name__)


class DynamicBlendMixin:
    """Adds scheduled weights, and a state by source, to any TaskEncoder.

    Put it first among the base classes. Where ``encode_sample`` is stateless, samples are planned
    by number: a run continues exactly on any ranks and workers, and an ``interleave`` counts each
    sample as 1. The sample's random numbers depend on the seed, its source, number and epoch; one
    that cannot be used is replaced by another one of its source.

    Else, and with a ``packing_buffer_size``, samples are streamed in Energon's own order: draw,
    shuffle, encode, pack, batch. Samples drawn under old weights are then still in a buffer when a
    weight changes. An ``interleave`` counts each as its ``num_tokens``, or as 1 where it has none;
    where an encoder has a method ``blend_sample_size(sample)``, as what that returns. A line in the
    log gives the reason.

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

    #: Whether samples are planned by number, where the encoder allows it.
    plan_samples: bool = True

    #: Planned samples that are stored side by side and read close to each other; some 2 MB of them
    #: make larger reads where one node reads all.
    sample_block: int = 1

    #: By which ``select_samples_to_pack`` reads the length of a sample, if it is not one of
    #: ``num_tokens``, ``total_len`` and ``length``.
    length_attribute: str = "length"

    #: Of the lengths in a row, where samples are packed by length: rows of a step are then dealt
    #: so that ranks end together. A cost that ``length_of`` gives beside the tokens is added.
    cost: Cost | None = None

    #: Of the sample that is encoded, where samples are planned, and the key of its source.
    sample_number: int | None = None
    source_key: str = ""

    #: Keys of all sources of the dataset, sorted.
    source_keys: tuple[str, ...] = ()

    _is_planned: bool = False
    _validating: bool = False
    _padding_row: Callable[[], Row] | None = None
    _tables: Mapping[str, LengthTable] = MappingProxyType({})

    #: Rows of a global batch; one batch of each rank where it is None.
    rows_per_step: int | None = None

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
        """Energon's method: Energon's own stages over one streamed blend, or a plan."""
        for name in ("shuffle_buffer_size", "packing_buffer_size"):
            if (size := stages.get(name)) is not None:
                check_integer(name, size, 0)
        mix = mix_of(datasets)
        if not repeat:
            check_unlimited(mix.entries)
        bound = self._bound_to(mix.entries, stages, repeat=repeat)
        # Sources of a plain blend repeat one by one; an epochized blend as a whole.
        epochized = blend_mode is DatasetBlendMode.SAMPLE_REPETITIONS
        sources = read_sources(bound, mix, worker_config, repeat=repeat and not epochized)
        check_omissions(mix, sources)
        open_live_weights(mix, sources)
        clock = Clock(
            mix.axis_with(self.schedule_axis),
            Topology.of(worker_config, stages.get("batch_size"), self.rows_per_step),
            bound.tokens_per_sample,
            mix.run.skip.ranges,
        )
        check_mixture(
            mix.tree,
            clock.axis,
            {source.key: source.max_epochs for source in sources},
            absent_sources(sources, worker_config),
            {each.key: each.rows.config for each in sources if isinstance(each.rows, SpliceSource)},
            clock.end,
        )
        passes = PassOptions(
            batches=even_virtual_epoch(virtual_epoch_length, worker_config),
            repeats=repeat and epochized,
            restarts=not repeat,
        )
        return bound.build_blend(
            sources, passes, stages, tree=mix.tree, clock=clock, worker_config=worker_config
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
        """Energon's method: all of each source once, in order; Energon's own where it is streamed.

        Samples of which there is no further whole batch for every rank are left out.
        """
        mix, options = mix_of(datasets), {**stages, "batch_size": batch_size}
        bound = self._bound_to(mix.entries, options, repeat=False, validating=True)
        if not bound._is_planned:
            return super().build_val_datasets(  # type: ignore[misc]  # of the encoder behind
                datasets=datasets, worker_config=worker_config, limit=limit, **options
            )
        sources = read_sources(bound, mix, worker_config, repeat=False)
        tree = blend_of({source.key: ConstantWeight(1.0) for source in sources}, IN_ORDER)
        topology = Topology.of(worker_config, batch_size, None)
        clock = Clock(mix.axis, topology, bound.tokens_per_sample)
        passes = PassOptions(batches=limit or 0, restarts=True)
        return bound.build_blend(
            sources, passes, {}, tree=tree, clock=clock, worker_config=worker_config
        )

    @property
    def current_sample_index(self) -> int:
        """Energon's number for random choices; where samples are planned, one of the sample."""
        if self.sample_number is not None:
            return self.sample_number
        return super().current_sample_index  # type: ignore[misc]  # of the encoder behind

    def _sizes_samples(self) -> bool:
        """True if this encoder counts samples itself; future TaskEncoders return 1 for each."""
        own = getattr(self, "blend_sample_size", None)
        return getattr(own, "__func__", own) is not getattr(TaskEncoder, "blend_sample_size", None)

    def build_source(self, entry: Entry, *, worker_config: WorkerConfig, repeat: bool) -> Any:
        """The rows of one source, or its samples before the draw where they are streamed.

        Override it to add stages of your own to each source; its samples are streamed then.
        """
        if self._is_planned:
            build = token_rows if isinstance(entry.dataset, TokenFileFactory) else sample_rows
            return build(self, entry, seed=worker_config.seed_offset, repeat=repeat)
        return load_source(self, entry, worker_config, repeat=repeat)

    def build_blend(
        self,
        sources: Sequence[Source],
        passes: PassOptions,
        stages: Mapping[str, Any],
        **options: Any,  # of a blend: tree, clock, worker_config
    ) -> SavableDataset:
        """A plan, or Energon's stages behind the draw among streamed sources."""
        if self._is_planned:
            batches = BatchOptions(
                assemble=self._batch_of,
                padding=self._padding_row,
                fingerprint=self.state_fingerprint(),
                encoder=self._saved(),
                cost=self.cost,
            )
            return PlannedDataset(sources, passes=passes, batches=batches, **options)
        if self._sizes_samples():
            options["size_of"] = self.blend_sample_size  # type: ignore[attr-defined]
        is_interleave = options["tree"].node.rule == INTERLEAVE
        blend_class = LeastConsumedDataset if is_interleave else DynamicBlendDataset
        blend = blend_class(
            sources,
            fingerprint=self.state_fingerprint(),
            repeats=passes.repeats,
            restarts=passes.restarts,
            **options,
        )
        return super().build_train_datasets(  # type: ignore[misc]  # of the encoder behind
            datasets=[LoadedDataset(dataset=_BlendFactory(blend))],
            worker_config=blend.worker_config,
            blend_mode=DatasetBlendMode.NONE,
            repeat=False,
            virtual_epoch_length=passes.batches,
            **stages,
        )

    def _batch_of(self, rows: list[Any]) -> Any:
        """A batch of planned rows or samples, by the encoder's own methods."""
        return self.encode_batch(self.batch(rows))  # type: ignore[attr-defined]

    def _saved(self) -> dict[str, Any]:
        """The encoder as a state describes it."""
        return saved_samples(self)

    def state_fingerprint(self) -> dict[str, Any]:
        """JSON values that a saved state depends on; extend it with what changes your samples."""
        named: dict[str, Any] = {ENCODER: type(self).__qualname__}
        if self.sample_block != 1:
            named["sample_block"] = self.sample_block
        if not packs_samples(self):
            return named
        packer = packer_of(self)
        return {**named, "seq_len": packer.seq_len, "packing": packer.to_json()}

    def _bound_to(
        self,
        entries: Sequence[Entry],
        stages: dict[str, Any],
        *,
        repeat: bool,
        validating: bool = False,
    ) -> Any:
        """The encoder of one dataset, checked against its sources; several may share this one.

        It takes away its own of ``stages``, the options of Energon's stages.
        """
        refuse_splices(self, entries)
        bound = copy.copy(self)
        bound._validating = validating
        is_finite = not repeat and not (validating and packs_samples(self))
        reason = self._obstacle(entries, stages, not is_finite)
        bound._is_planned = reason is None
        if reason is not None:
            logger.info("Samples are streamed, on the ranks x workers of this run: %s.", reason)
        elif packs_samples(self):
            bound.tokens_per_sample = packer_of(bound).seq_len
            bound._tables = ensure_measured(bound, entries)
        if self.cost is not None and not bound.tokens_per_sample:
            raise ConfigError(
                f"{type(self).__qualname__}.cost: deals planned rows of samples with lengths; "
                f"{reason or 'the encoder has no length_of'}."
            )
        return bound

    def _obstacle(
        self, entries: Sequence[Entry], stages: Mapping[str, Any], repeat: bool
    ) -> str | None:
        """Why samples have to be streamed; None where they are planned."""
        if not self.plan_samples:
            return "plan_samples is False"
        for name in ("build_source", "build_blend"):
            if getattr(type(self), name) is not getattr(DynamicBlendMixin, name):
                return f"{name} is the encoder's own"
        if self._sizes_samples():
            return "blend_sample_size counts samples that were read"
        return obstacle(self, entries, stages, repeat)


class _BlendFactory:
    """A blend as the factory of one dataset, as far as Energon's stages ask."""

    # No sample type: they ask only whether samples are crude, which the sources answer.
    __sample_type__ = None

    def __init__(self, blend: SavableDataset):
        self._blend = blend

    def __len__(self) -> int:
        return 1

    def build(self, worker_rotation_offset: int = 0) -> SavableDataset:
        return self._blend
