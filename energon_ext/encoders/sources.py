# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The sources of a metadataset, and many of them as one dataset of Energon."""

import copy
import functools
import logging
from dataclasses import dataclass
from typing import Any, Callable, Sequence

from megatron.energon import WorkerConfig
from megatron.energon.flavors.base_dataset import BaseCoreDatasetFactory, SavableDataset
from megatron.energon.task_encoder.base import get_failure_tolerance, get_stateless
from megatron.energon.wrappers.map_dataset import MapDataset
from megatron.energon.wrappers.shuffle_buffer_dataset import ShuffleBufferDataset

from energon_ext.arguments import check_integer, choices
from energon_ext.config.mix import Entry, Mix
from energon_ext.documents.permutation import stable_hash
from energon_ext.documents.stored_files import fingerprint_files
from energon_ext.encoders.quiet import quiet_errors
from energon_ext.errors import ConfigError
from energon_ext.mixture.tree import IN_ORDER, Tree, blend_of
from energon_ext.plan.row_source import RowSource
from energon_ext.plan.rows import PlannedRows
from energon_ext.plan.source import Source
from energon_ext.weights import ConstantWeight

logger = logging.getLogger(__name__)

#: Documents of a planned source that are packed together, unless ``packing_buffer_docs`` is more:
#: so many in all, and at least and at most so many of one source.
PLANNED_BUFFERS_DOCS, LEAST_PLANNED_BUFFER_DOCS, MOST_PLANNED_BUFFER_DOCS = 2**20, 1024, 4096


class BlendFactory(BaseCoreDatasetFactory):
    """A blend as the factory of one dataset, which is what Energon's stages ask for."""

    # No sample type: Energon asks only whether samples are crude, which the sources answer.
    __sample_type__ = None

    def __init__(self, blend: SavableDataset):
        self.paths: list[Any] = []
        self.subflavors: dict[str, Any] = {}
        self._blend = blend

    def __len__(self) -> int:
        return 1

    def build(self, worker_rotation_offset: int = 0) -> SavableDataset:
        return self._blend

    def as_file_store(self) -> Any:
        raise NotImplementedError("A blend of sources is not a file store.")


@dataclass(frozen=True)
class MixOfSources:
    """The sources of a metadataset, built, with the tree that draws among them."""

    sources: list[Source]
    tree: Tree
    skip: tuple[tuple[int, int], ...] = ()

    @property
    def is_planned(self) -> bool:
        """Whether the rows of all sources are planned."""
        return all(isinstance(source.rows, RowSource) for source in self.sources)


def load_source(task_encoder: Any, entry: Entry, worker_config: WorkerConfig) -> SavableDataset:
    """The raw (or cooked) samples of one source, in an order of its own.

    The order, and which worker gets the remainder, depend on the seed and its name, neither on
    its neighbours nor on their number; a dataset listed twice is read in two orders.
    """
    number = stable_hash(entry.names.shuffle_key)
    own_config = copy.copy(worker_config)
    own_config.seed_offset += number
    # Energon built the factory for all sources alike; random numbers come from its configuration.
    entry.dataset.worker_config = own_config
    rotation = number % (max(1, worker_config.num_workers) * worker_config.world_size)
    dataset = task_encoder._load_dataset(entry.loaded, rotation, worker_config=own_config)
    quiet_errors(dataset)
    return dataset


def encoded_samples(
    task_encoder: Any,
    samples: SavableDataset,
    encode: Callable[..., Any],
    *,
    shuffle_buffer: int = 0,
    **fixed: Any,
) -> SavableDataset:
    """The samples of one source, each through a method of the encoder, and shuffled."""
    encoded = MapDataset(
        samples,
        functools.partial(encode, **fixed) if fixed else encode,
        worker_config=samples.worker_config,
        stateless_map_fn=get_stateless(encode),
        failure_tolerance=get_failure_tolerance(encode, task_encoder.__default_failure_tolerance__),
    )
    quiet_errors(encoded)
    if shuffle_buffer <= 1:
        return encoded
    return ShuffleBufferDataset(encoded, shuffle_buffer, worker_config=samples.worker_config)


def read_sources(
    task_encoder: Any,
    mix: Mix,
    *,
    worker_config: WorkerConfig,
    repeat: bool,
    in_order: bool = False,
) -> MixOfSources:
    """Build the sources of a mix.

    Args:
        repeat: whether a source begins again at its end.
        in_order: read one after the other, whatever the weights are.

    Raises:
        ConfigError: planned and streamed sources in one blend, or omissions that are not possible.
    """
    sources = [
        Source(
            key=entry.key,
            rows=task_encoder.build_source(entry, worker_config=worker_config, repeat=repeat),
            documents=len(entry.dataset),
            max_epochs=entry.max_epochs,
            names=entry.names,
            shown_as=entry.name,
            fingerprint=fingerprint_files(entry.dataset),
        )
        for entry in mix.entries
    ]
    _check_alike(sources)
    if in_order:
        keys = [source.key for source in sources]
        return MixOfSources(sources, blend_of({key: ConstantWeight(1.0) for key in keys}, IN_ORDER))
    check_omissions(mix, sources)
    return MixOfSources(sources, mix.tree, mix.run.skip.ranges)


def _check_alike(sources: Sequence[Source]) -> None:
    """Refuse planned and streamed sources in one blend."""
    planned = [source.key for source in sources if isinstance(source.rows, RowSource)]
    streamed = [source.key for source in sources if not isinstance(source.rows, RowSource)]
    if planned and streamed:
        raise ConfigError(
            f"{streamed[0]} is streamed and {planned[0]} is planned; a blend is one or the other. "
            f"Make token files of {streamed[0]} (`energon-ext prepare`), or take one of them out."
        )


def planned_buffer_docs(sources: int) -> int:
    """Documents that each of so many sources packs together; many, as a plan reads lengths only."""
    shared = PLANNED_BUFFERS_DOCS // max(1, sources)
    return min(MOST_PLANNED_BUFFER_DOCS, max(LEAST_PLANNED_BUFFER_DOCS, shared))


def check_omissions(mix: Mix, sources: Sequence[Source]) -> None:
    """Refuse to skip or exclude what cannot be: of a source that is streamed, or not there."""
    skip, exclude = mix.run.skip, mix.run.exclude
    keys = [source.key for source in sources]
    for key in exclude.documents:
        if key not in keys:
            raise ConfigError(
                f"{exclude.where}: exclude: no source {key!r}; there is {choices(key, keys)}"
            )
    for source in sources:
        if skip.ranges and not isinstance(source.rows, RowSource):
            raise ConfigError(
                f"{skip.where}: skip: {source.key} is streamed; steps of token files alone are "
                f"skipped."
            )
        if source.key in exclude.documents and not isinstance(source.rows, PlannedRows):
            raise ConfigError(
                f"{exclude.where}: exclude: {source.key} is streamed or spliced; documents of "
                f"token files alone are excluded."
            )


def absent_sources(mix: MixOfSources, worker_config: WorkerConfig) -> dict[str, list[str]]:
    """For each worker of this rank that has no sample of some streamed source: of which."""
    absent = {}
    for worker in range(0 if mix.is_planned else max(1, worker_config.num_workers)):
        missing = [source.key for source in mix.sources if not source.rows.len_worker(worker)]
        if missing:
            absent[f"worker {worker} of rank {worker_config.rank}"] = missing
    return absent


def check_unlimited(entries: Sequence[Entry]) -> None:
    """Refuse a limit on the epochs of a source where every source is read once anyway."""
    for entry in entries:
        if entry.max_epochs is not None:
            raise ConfigError(
                f"{entry.where}.max_epochs: {entry.max_epochs} with repeat=False, which reads "
                f"every source once; leave out one of the two."
            )


def even_virtual_epoch(length: int, worker_config: WorkerConfig) -> int:
    """The length, rounded up so that each worker has as many batches of an epoch as the others.

    Else they would drift apart, and with them the step that each of them draws.
    """
    check_integer("virtual_epoch_length", length, 0)
    workers = max(1, worker_config.num_workers)
    even = -(-length // workers) * workers
    if even != length and worker_config.rank == 0:
        logger.info("virtual_epoch_length: %d, from %d, for %d workers", even, length, workers)
    return even
