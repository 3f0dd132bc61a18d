# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The only override of Energon's ``build_train_datasets``.

Energon's method blends, shuffles, encodes, packs and batches in one body. Planned sources need none
of these stages. For streamed sources the override passes a single pseudo-dataset to Energon's
method, whose factory returns our blend of the real sources, so that Energon has nothing to blend.
"""

import copy
from collections.abc import Callable
from types import MappingProxyType
from typing import Any, Mapping, Sequence

from megatron.energon import TaskEncoder, WorkerConfig
from megatron.energon.flavors.base_dataset import SavableDataset
from megatron.energon.metadataset.loader_interface import DatasetBlendMode, LoadedDataset

from energon_ext.arguments import check_integer
from energon_ext.config.mix import Entry, mix_of
from energon_ext.encoders.measured import ensure_measured
from energon_ext.encoders.planned_samples import (
    packer_of,
    packs_samples,
    plan_sample_source,
    plan_token_source,
    reason_to_stream,
    saved_samples,
)
from energon_ext.encoders.sources import (
    absent_sources,
    build_sources,
    check_fields,
    check_omissions,
    check_unlimited,
    even_virtual_epoch,
    load_source,
    open_live_weights,
)
from energon_ext.errors import ConfigError, log_of
from energon_ext.loader.planned_dataset import PlannedDataset
from energon_ext.loader.reader import BatchReader
from energon_ext.mixture.checks import check_mixture
from energon_ext.mixture.tree import IN_ORDER, INTERLEAVE, Tree, blend_of
from energon_ext.plan.clock import Clock
from energon_ext.plan.cost import Cost
from energon_ext.plan.length import check_all_rows_are_read
from energon_ext.plan.run import Run, RunOptions
from energon_ext.plan.topology import Topology
from energon_ext.prepare.lengths import LengthTable
from energon_ext.splice.frames import Frames
from energon_ext.state.match import ENCODER
from energon_ext.streamed.blend import DynamicBlendDataset, LeastConsumedDataset
from energon_ext.streamed.factory import BlendFactory
from energon_ext.weights import ConstantWeight, ScheduleAxis

logger = log_of(__name__)


class DynamicBlendMixin:
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

    #: Positions per row of the blend if all rows have the same number; else 0.
    tokens_per_sample: int = 0

    #: Whether to plan samples by number if the encoder allows it.
    plan_samples: bool = True

    #: Number of adjacent stored samples that a plan keeps close together; blocks of about 2 MB make
    #: reads larger if one node reads all samples.
    sample_block: int = 1

    #: Attribute from which ``select_samples_to_pack`` reads the length of a sample, if that is not
    #: ``num_tokens``, ``total_len`` or ``length``.
    length_attribute: str = "length"

    #: Cost of the lengths in a row, if samples are packed by length; the rows of a step are then
    #: balanced, so that ranks finish together. A cost that ``length_of`` returns is added.
    cost: Cost | None = None

    #: Number of the planned sample that is being encoded, the key of its source, and all keys.
    sample_number: int | None = None
    source_key: str = ""
    source_keys: tuple[str, ...] = ()

    #: Whether the encoder was rebuilt from a state, without the code that encodes a sample.
    is_rebuilt: bool = False

    _is_planned: bool = False
    _validating: bool = False
    #: Makes padding of a row that was read, to complete the last step: an encoded sample, or the
    #: result of ``pack_selected_samples``, in which nothing counts any more.
    make_padding: Callable[[Any], Any] | None = None
    _tables: Mapping[str, LengthTable] = MappingProxyType({})

    #: Rows of a global batch; None for one batch per rank.
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
        """Build a plan, or Energon's own stages over one streamed blend."""
        for name in ("shuffle_buffer_size", "packing_buffer_size"):
            if (size := stages.get(name)) is not None:
                check_integer(name, size, 0)
        mix = mix_of(datasets)
        if not repeat:
            check_unlimited(mix.entries)
        bound = self._bound_to(mix.entries, stages, repeat=repeat)
        # Sources of a plain blend repeat separately; an epochized blend repeats as a whole.
        epochized = blend_mode is DatasetBlendMode.SAMPLE_REPETITIONS
        sources = build_sources(bound, mix, worker_config, repeat=repeat and not epochized)
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
            _splices_of(sources),
            clock.end,
        )
        passes = {
            "pass_batches": even_virtual_epoch(virtual_epoch_length, worker_config),
            "repeats": repeat and epochized,
            "restarts": not repeat,
        }
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
        """Read each source once and in order; leave streamed sources to Energon's own method.

        Raises:
            ConfigError: some rows do not fill a batch on every rank, and nothing completes it.
        """
        mix, options = mix_of(datasets), {**stages, "batch_size": batch_size}
        bound = self._bound_to(mix.entries, options, repeat=False, validating=True)
        if not bound._is_planned:
            return super().build_val_datasets(  # type: ignore[misc]  # of the next base class
                datasets=datasets, worker_config=worker_config, limit=limit, **options
            )
        sources = build_sources(bound, mix, worker_config, repeat=False)
        tree = blend_of({source.key: ConstantWeight(1.0) for source in sources}, IN_ORDER)
        topology = Topology.of(worker_config, batch_size, None)
        clock = Clock(mix.axis, topology, bound.tokens_per_sample)
        passes = {"pass_batches": limit or 0, "restarts": True}
        dataset = bound.build_blend(
            sources, passes, {}, tree=tree, clock=clock, worker_config=worker_config
        )
        check_all_rows_are_read(dataset.run, type(self).__qualname__)
        return dataset

    @property
    def current_sample_index(self) -> int:
        """Energon's index for random choices; for a planned sample, the sample's own number."""
        if self.sample_number is not None:
            return self.sample_number
        return super().current_sample_index  # type: ignore[misc]  # of the next base class

    def _sizes_samples(self) -> bool:
        """Return True if this encoder overrides the size of 1 that future TaskEncoders return."""
        size, default = (getattr(c, "blend_sample_size", None) for c in (self, TaskEncoder))
        return getattr(size, "__func__", size) is not default

    def build_source(self, entry: Entry, *, worker_config: WorkerConfig, repeat: bool) -> Any:
        """Build the rows of one source, or, if streamed, its samples before the draw.

        Override it to add your own stages to each source; samples are then streamed.
        """
        if self._is_planned:
            is_tokenized = entry.documents is not None
            build = plan_token_source if is_tokenized else plan_sample_source
            return build(self, entry, seed=worker_config.seed_offset, repeat=repeat)
        return load_source(self, entry, worker_config, repeat=repeat)

    def build_blend(
        self,
        sources: Sequence[Any],
        passes: Mapping[str, Any],
        stages: Mapping[str, Any],
        *,
        tree: Tree,
        clock: Clock,
        worker_config: WorkerConfig,
    ) -> Any:
        """Build a plan, or the draw among streamed sources followed by Energon's stages."""
        if self._is_planned:
            padding = self._padding()
            options = RunOptions(
                seed=worker_config.seed_offset,
                fills_last_step=padding is not None,
                fingerprint=self.state_fingerprint(),
                encoder=self._saved(),
                cost=self.cost,
                **passes,
            )
            run = Run(sources, tree=tree, clock=clock, options=options)
            readers = [source.reader for source in run.sources.values()]
            batches = BatchReader(readers, self._batch_of, padding)
            return PlannedDataset(run, batches, worker_config=worker_config)
        sizes: dict[str, Any] = {}
        if self._sizes_samples():
            sizes["size_of"] = self.blend_sample_size  # type: ignore[attr-defined]
        is_interleave = tree.node.rule == INTERLEAVE
        blend_class = LeastConsumedDataset if is_interleave else DynamicBlendDataset
        blend = blend_class(
            sources,
            tree=tree,
            clock=clock,
            worker_config=worker_config,
            fingerprint=self.state_fingerprint(),
            repeats=passes["repeats"],
            restarts=passes["restarts"],
            **sizes,
        )
        return super().build_train_datasets(  # type: ignore[misc]  # of the next base class
            datasets=[LoadedDataset(dataset=BlendFactory(blend))],
            worker_config=blend.worker_config,
            blend_mode=DatasetBlendMode.NONE,
            repeat=False,
            virtual_epoch_length=passes["pass_batches"],
            **stages,
        )

    def _batch_of(self, rows: list[Any]) -> Any:
        """Build a batch of planned rows or samples with the encoder's own methods."""
        batch = self.encode_batch(self.batch(rows))  # type: ignore[attr-defined]
        if batch is None:  # would look like the end of the data
            raise ConfigError(
                f"{type(self).__qualname__}.encode_batch: returned None; return every batch, since "
                f"all ranks read equally many."
            )
        return batch

    def _padding(self) -> Callable[[Callable[[], Any]], Any] | None:
        """Return what builds padding, given a function that reads a row; None if nothing does."""
        make = self.make_padding
        return None if make is None else lambda read: make(read())

    def _saved(self) -> dict[str, Any]:
        """Return the encoder's description for a state."""
        return saved_samples(self)

    def state_fingerprint(self) -> dict[str, Any]:
        """Return JSON values that a state depends on; add whatever changes your samples."""
        fingerprint: dict[str, Any] = {ENCODER: type(self).__qualname__}
        if self.sample_block != 1:
            fingerprint["sample_block"] = self.sample_block
        if packs_samples(self):
            packer = packer_of(self)
            fingerprint |= {"seq_len": packer.seq_len, "packing": packer.to_json()}
        return fingerprint

    def _bound_to(
        self,
        entries: Sequence[Entry],
        stages: dict[str, Any],
        *,
        repeat: bool,
        validating: bool = False,
    ) -> Any:
        """Return a copy for one dataset, since several datasets may share this encoder.

        Subclasses remove options that they handle themselves from Energon's ``stages``.
        """
        check_fields(self, entries)
        bound = copy.copy(self)
        bound._validating = validating
        is_complete = repeat or self.make_padding is not None
        is_complete |= validating and packs_samples(self)  # or the dataset is refused
        reason = self._reason_to_stream(entries, stages, is_complete)
        bound._is_planned = reason is None
        if reason is not None:
            logger.info("Samples are streamed, which fixes the ranks x workers: %s.", reason)
        elif packs_samples(self):
            bound.tokens_per_sample = packer_of(bound).seq_len
            bound._tables = ensure_measured(bound, entries)
        if self.cost is not None and not bound.tokens_per_sample:
            raise ConfigError(
                f"{type(self).__qualname__}.cost: needs planned rows of samples with lengths; "
                f"{reason or 'the encoder has no length_of'}."
            )
        return bound

    def _reason_to_stream(
        self, entries: Sequence[Entry], stages: Mapping[str, Any], is_complete: bool
    ) -> str | None:
        """Return why samples must be streamed; None if they are planned."""
        if not self.plan_samples:
            return "plan_samples is False"
        for name in ("build_source", "build_blend"):
            if getattr(type(self), name) is not getattr(DynamicBlendMixin, name):
                return f"the encoder overrides {name}"
        if self._sizes_samples():
            return "blend_sample_size needs samples that have been read"
        return reason_to_stream(self, entries, stages, is_complete)


def _splices_of(sources: Sequence[Any]) -> dict[str, Any]:
    """Return the splice of each spliced source, by key."""
    rows = {source.key: getattr(source, "first_rows", None) for source in sources}
    return {key: each.config for key, each in rows.items() if isinstance(each, Frames)}
