# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The only override of Energon's ``build_train_datasets``.

Energon's method blends, shuffles, encodes, packs and batches in one body. Planned sources need none
of these stages. For streamed sources the override passes a single pseudo-dataset to Energon's
method, whose factory returns our blend of the real sources, so that Energon has nothing to blend.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from megatron.energon import TaskEncoder, WorkerConfig
from megatron.energon.flavors.base_dataset import SavableDataset
from megatron.energon.metadataset.loader_interface import DatasetBlendMode, LoadedDataset

from energon_ext.arguments import check_integer
from energon_ext.config.mix import Entry, mix_of
from energon_ext.encoders.plan_mix import plan_mix
from energon_ext.encoders.quiet import quiet_encoding
from energon_ext.encoders.sample_task import SampleTask, refuse_contexts
from energon_ext.encoders.sources import check_unlimited, even_virtual_epoch
from energon_ext.encoders.stream_mix import load_source, stream_mix
from energon_ext.encoders.task import Passes, Task
from energon_ext.errors import ConfigError
from energon_ext.plan.clock import Clock
from energon_ext.plan.cost import Cost
from energon_ext.plan.length import check_all_rows_are_read
from energon_ext.plan.lookup import STREAMED
from energon_ext.plan.spec import SAMPLES
from energon_ext.plan.topology import Topology
from energon_ext.samples.context import current_context
from energon_ext.samples.methods import SampleMethods
from energon_ext.state.match import ENCODER
from energon_ext.streamed.blend import BlendFactory, StreamedBlend
from energon_ext.weights import ScheduleAxis

_Task = TypeVar("_Task", bound=SampleTask)


class DynamicBlendMixin(TaskEncoder):
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

    #: Positions per row of the blend if all rows have the same number; else 0.
    tokens_per_sample: int = 0

    #: Number of adjacent stored samples that a plan keeps close together; blocks of about 2 MB make
    #: reads larger if one node reads all samples.
    sample_block: int = 1

    #: Attribute from which ``select_samples_to_pack`` reads the length of a sample, if that is not
    #: ``num_tokens``, ``total_len`` or ``length``.
    length_attribute: str = "length"

    #: Cost of the lengths in a row, if samples are packed by length; the rows of a step are then
    #: balanced, so that ranks finish together. A cost that ``length_of`` returns is added.
    cost: Cost | None = None

    #: Makes padding of a row that was read, to complete the last step: an encoded sample, or the
    #: result of ``pack_selected_samples``, in which nothing counts any more.
    make_padding: Callable[[Any], Any] | None = None

    def __init_subclass__(cls, **options: Any) -> None:
        """Let an attribute of another base class win over the default here, in any order."""
        super().__init_subclass__(**options)
        for name in DynamicBlendMixin.__annotations__:
            owners = [each for each in cls.__mro__ if name in vars(each)]
            others = [each for each in owners if each is not DynamicBlendMixin]
            if others and owners[0] is DynamicBlendMixin:
                setattr(cls, name, vars(others[0])[name])

    def task(self) -> Task:
        """Return what a run asks of this encoder."""
        return self._sample_task(SampleTask)

    def _sample_task(self, task_class: type[_Task], **options: Any) -> _Task:
        refuse_contexts(self, getattr(self, "contexts", None))
        methods = SampleMethods.of(self)
        return task_class(
            encoder=self,
            fingerprint=self.state_fingerprint,
            packers={SAMPLES: methods.packer},
            cost=self.cost,
            methods=methods,
            row_tokens=self.tokens_per_sample,
            block=self.sample_block,
            make_padding=self.make_padding,
            streamed=self._why_streamed(),
            **options,
        )

    def _why_streamed(self) -> str | None:
        if not self.plan_samples:
            return "plan_samples is False"
        for name in ("build_streamed_source", "build_streamed_blend"):
            if getattr(type(self), name) is not getattr(DynamicBlendMixin, name):
                return f"the encoder overrides {name}"
        return None

    def state_fingerprint(self) -> dict[str, Any]:
        """Return JSON values that a state depends on; add whatever changes your samples."""
        return {ENCODER: type(self).__qualname__}

    # Methods that ask where they are called ------------------------------------------------------

    @property
    def source_key(self) -> str:
        """Key of the source whose samples are encoded or packed; ConfigError anywhere else."""
        key = current_context().source_key
        if not key:  # an empty one would be taken for a source
            raise ConfigError(
                f"{type(self).__qualname__}.source_key: unknown, since no planned sample is "
                f"encoded or packed in this thread; use `__subflavors__` of the sample, or pass "
                f"the key to a thread of your own."
            )
        return key

    @property
    def source_keys(self) -> tuple[str, ...]:
        """All keys that the rows of a batch may have, while a planned batch is made."""
        return current_context().source_keys

    @property
    def sample_number(self) -> int | None:
        """Number of the random choices of the planned sample that is encoded; None outside one."""
        return current_context().sample_number

    @property
    def current_sample_index(self) -> int:
        """Energon's index for random choices; for a planned sample, the sample's own number."""
        number = self.sample_number
        return super().current_sample_index if number is None else number

    # Energon's interface -------------------------------------------------------------------------

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
        task = self.task()
        in_layouts = task.contexts is not None
        topology = Topology.of(
            worker_config, stages.get("batch_size"), self.rows_per_step, in_layouts
        )
        if not task.is_streamed(mix.entries, stages, passes):
            return plan_mix(mix, task, topology, passes, worker_config, self.schedule_axis)
        axis, skip = mix.axis_with(self.schedule_axis), mix.run.skip.ranges
        clock = Clock(axis, topology, self.tokens_per_sample, skip)
        build, size_of = self.build_streamed_source, SampleMethods.of(self).size_of
        drawn = stream_mix(mix, task, clock, passes, build, size_of, worker_config)
        return self.build_streamed_blend(drawn, passes, stages)

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
        passes = Passes(repeat=False, validating=True, batches=limit or 0)
        task = self.task()
        if task.is_streamed(mix.entries, options, passes):
            built = super().build_val_datasets(
                datasets=datasets, worker_config=worker_config, limit=limit, **options
            )
            setattr(built, STREAMED, True)
            return built
        topology = Topology.of(worker_config, batch_size, None, task.contexts is not None)
        dataset = plan_mix(mix, task, topology, passes, worker_config)
        check_all_rows_are_read(dataset.run, type(self).__qualname__)
        return dataset

    def build_streamed_source(
        self, entry: Entry, *, worker_config: WorkerConfig, repeat: bool
    ) -> SavableDataset:
        """Build the samples of one source before the draw.

        Override it to add your own stages to each source; samples are then streamed.
        """
        return load_source(self, entry, worker_config, repeat=repeat)

    def build_streamed_blend(
        self, drawn: StreamedBlend, passes: Passes, stages: Mapping[str, Any]
    ) -> SavableDataset:
        """Build Energon's stages over the draw among streamed sources."""
        built = super().build_train_datasets(
            datasets=[LoadedDataset(dataset=BlendFactory(drawn))],
            worker_config=drawn.worker_config,
            blend_mode=DatasetBlendMode.NONE,
            repeat=False,
            virtual_epoch_length=passes.batches,
            **stages,
        )
        return quiet_encoding(built, self)
