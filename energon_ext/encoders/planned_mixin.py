# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The part of :class:`~energon_ext.DynamicBlendMixin` that plans samples by number."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from megatron.energon import TaskEncoder, WorkerConfig

from energon_ext.config.mix import Entry
from energon_ext.encoders.measured import ensure_measured
from energon_ext.encoders.plan_mix import Live
from energon_ext.encoders.planned_samples import open_lengths, open_sample_reader
from energon_ext.encoders.planning import MAX_BUFFER_DOCS
from energon_ext.errors import ConfigError
from energon_ext.loader.planned_dataset import PlannedDataset
from energon_ext.loader.reader import BatchReader
from energon_ext.packing import BestFitPacker
from energon_ext.plan.cost import Cost, cost_to_json
from energon_ext.plan.run import Run
from energon_ext.plan.spec import DOCUMENTS, SAMPLES, KindSpec, Spec
from energon_ext.samples.context import current_context, encoder_context
from energon_ext.samples.methods import SampleMethods, find
from energon_ext.state.match import ENCODER
from energon_ext.tokens.documents import Lengths


class PlannedMixin:
    """Plans samples by number; see :class:`~energon_ext.DynamicBlendMixin`."""

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
        if self.sample_number is not None:
            return self.sample_number
        return super().current_sample_index  # type: ignore[misc]  # of the next base class

    # Planned sources -----------------------------------------------------------------------------

    def spec(self, entries: Sequence[Entry], seed: int) -> Spec:
        """Return the spec of a run over some sources."""
        encoder = cast(TaskEncoder, self)
        methods = self.find_methods()
        packer = methods.packer.to_json() if methods.are_packed else None
        samples = KindSpec(packer=packer, encoding=methods.identity, block=self.sample_block)
        kinds = {SAMPLES: samples}
        if methods.are_packed and find(encoder, "pack_tokens") is not None:
            kinds[DOCUMENTS] = KindSpec(packer=BestFitPacker(methods.packer.seq_len).to_json())
        return Spec(
            row_tokens=methods.packer.seq_len if methods.are_packed else self.tokens_per_sample,
            kinds=kinds,
            seed=seed,
            buffer_docs=MAX_BUFFER_DOCS,
            pads=self.make_padding is not None,
            cost=cost_to_json(self.cost),
            own=self.state_fingerprint(),
        )

    def find_methods(self) -> SampleMethods:
        """Return the methods by which samples are planned and read."""
        encoder = cast(TaskEncoder, self)
        return SampleMethods.of(encoder)

    def open_columns(self, entries: Sequence[Entry], validating: bool) -> dict[str, Lengths]:
        """Open the lengths of each source, and measure samples if necessary.

        Args:
            validating: whether each document is read once, in order.
        """
        encoder = cast(TaskEncoder, self)
        methods = self.find_methods()
        tables = ensure_measured(encoder, methods, entries)
        return {entry.key: open_lengths(entry, tables.get(entry.key), methods) for entry in entries}

    def make_live(self, spec: Spec) -> Live:
        """Return what the encoder has of its spec as live objects."""
        encoder = cast(TaskEncoder, self)
        methods = self.find_methods()
        open_reader = functools.partial(open_sample_reader, encoder, methods, spec)
        return Live(packers={SAMPLES: methods.packer}, cost=self.cost, open_reader=open_reader)

    def _make_dataset(
        self, run: Run, pad_id: int | None, worker_config: WorkerConfig
    ) -> PlannedDataset:
        """Return a dataset that reads the batches of a run."""
        keys = tuple(sorted({key for source in run.sources.values() for key in source.parts}))
        context = {"source_keys": keys, "pad_id": pad_id}
        readers = [source.reader for source in run.sources.values()]
        assemble = functools.partial(self._batch_of, context)
        padding = self._padding()
        pad = None if padding is None else functools.partial(_pad, run.keys, padding)
        parts = [tuple(each.parts) for each in run.sources.values()] if run.loss_weights else []
        batches = BatchReader(readers, assemble, pad, parts)
        return PlannedDataset(run, batches, worker_config=worker_config)

    def _batch_of(self, context: Mapping[str, Any], rows: list[Any]) -> Any:
        """Build a batch of planned rows or samples with the encoder's own methods."""
        with encoder_context(**context):
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

    def state_fingerprint(self) -> dict[str, Any]:
        """Return JSON values that a state depends on; add whatever changes your samples."""
        return {ENCODER: type(self).__qualname__}


def _pad(
    keys: Sequence[str],
    padding: Callable[[Callable[[], Any]], Any],
    source: int,
    read: Callable[[], Any],
) -> Any:
    """Make padding of a row of a source, given by its number."""
    with encoder_context(source_key=keys[source]):
        return padding(read)
