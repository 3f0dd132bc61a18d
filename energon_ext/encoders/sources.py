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
from megatron.energon.metadataset.loader_interface import LoadedDataset
from megatron.energon.task_encoder.base import get_failure_tolerance, get_stateless
from megatron.energon.wrappers.map_dataset import MapDataset
from megatron.energon.wrappers.shuffle_buffer_dataset import ShuffleBufferDataset

from energon_ext.arguments import check_integer
from energon_ext.config.left_out import LeftOut
from energon_ext.config.source_key import (
    get_origin,
    left_out_of,
    name_nodes,
    shuffle_key,
    source_keys,
    source_names,
)
from energon_ext.documents.permutation import stable_hash
from energon_ext.documents.stored_files import fingerprint_files
from energon_ext.encoders.quiet import quiet_errors
from energon_ext.errors import ConfigError
from energon_ext.mixture.tree import IN_ORDER, PathStep, Tree, blend_of, path_of, tree_of
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


def load_source(
    task_encoder: Any, loaded: LoadedDataset, key: str, worker_config: WorkerConfig
) -> SavableDataset:
    """The raw (or cooked) samples of one source, in an order of its own.

    The order, and which worker gets the odd sample out, depend on the seed and its name, neither on
    its neighbours nor on their number; a dataset listed twice is read in two orders.
    """
    number = stable_hash(shuffle_key(key, loaded.dataset))
    own_config = copy.copy(worker_config)
    own_config.seed_offset += number
    # Energon built the factory for all sources alike; random numbers come from its configuration.
    loaded.dataset.worker_config = own_config
    rotation = number % (max(1, worker_config.num_workers) * worker_config.world_size)
    dataset = task_encoder._load_dataset(loaded, rotation, worker_config=own_config)
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
    datasets: Sequence[LoadedDataset],
    *,
    worker_config: WorkerConfig,
    repeat: bool,
    in_order: bool = False,
) -> MixOfSources:
    """Build the sources of some loaded datasets, and their tree.

    Args:
        repeat: whether a source begins again at its end.
        in_order: read one after the other, whatever the weights are.

    Raises:
        ConfigError: no source, one without samples, two of one name, planned and streamed ones in
            one blend, or exclusions that are not possible.
    """
    if not datasets:
        raise ConfigError("The metadataset names no source; list at least one.")
    factories = [loaded.dataset for loaded in datasets]
    keys, names = source_keys(factories), source_names(factories)
    origins = [get_origin(factory) for factory in factories]
    for key, factory, origin in zip(keys, factories, origins):
        if len(factory) == 0:
            place = f" ({origin.where})" if origin.where else ""
            raise ConfigError(
                f"Source {key}{place} has no samples; prepare it again or leave it out."
            )
    shown = [origin.name for origin in origins]
    for key, name in zip(keys, shown):
        if name is not None and [*keys, *shown].count(name) > 1 and name != key:
            raise ConfigError(f"name: {name!r} is that of two sources, {key} for one; rename it.")
    sources = [
        Source(
            key=key,
            rows=task_encoder.build_source(loaded, key, worker_config=worker_config, repeat=repeat),
            documents=len(loaded.dataset),
            max_epochs=origin.max_epochs,
            names=own_names,
            shown_as=origin.name,
            fingerprint=fingerprint_files(loaded.dataset),
        )
        for key, own_names, origin, loaded in zip(keys, names, origins, datasets)
    ]
    _check_alike(sources)
    if in_order:
        return MixOfSources(sources, blend_of({key: ConstantWeight(1.0) for key in keys}, IN_ORDER))
    left_out = left_out_of(factories)
    check_left_out(left_out, sources)
    tree = tree_of([(key, _path(loaded)) for key, loaded in zip(keys, datasets)])
    name_nodes(tree, factories)
    return MixOfSources(sources, tree, left_out.skip)


def _check_alike(sources: Sequence[Source]) -> None:
    """Refuse planned and streamed sources in one blend."""
    planned = [source.key for source in sources if isinstance(source.rows, RowSource)]
    streamed = [source.key for source in sources if not isinstance(source.rows, RowSource)]
    if planned and streamed:
        raise ConfigError(
            f"{streamed[0]} is streamed and {planned[0]} is planned; a blend is one or the other. "
            f"Prepare {streamed[0]} as token files, or take one of them out."
        )


def planned_buffer_docs(sources: int) -> int:
    """Documents that each of so many sources packs together; many, as a plan reads lengths only."""
    shared = PLANNED_BUFFERS_DOCS // max(1, sources)
    return min(MOST_PLANNED_BUFFER_DOCS, max(LEAST_PLANNED_BUFFER_DOCS, shared))


def check_left_out(left_out: LeftOut, sources: Sequence[Source]) -> None:
    """Refuse to leave out what cannot be: of a source that is streamed, or not there."""
    left_out.check_sources([source.key for source in sources])
    for source in sources:
        if left_out.skip and not isinstance(source.rows, RowSource):
            raise ConfigError(
                f"{left_out.where}: skip: {source.key} is streamed; steps of token files alone are "
                f"skipped."
            )
        if source.key in left_out.excluded and not isinstance(source.rows, PlannedRows):
            raise ConfigError(
                f"{left_out.where}: exclude: {source.key} is streamed or spliced; documents of "
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


def check_unlimited(datasets: Sequence[LoadedDataset]) -> None:
    """Refuse a limit on the epochs of a source where every source is read once anyway."""
    for loaded in datasets:
        origin = get_origin(loaded.dataset)
        if origin.max_epochs is not None:
            raise ConfigError(
                f"{origin.where}.max_epochs: {origin.max_epochs} with repeat=False, which reads "
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


def _path(loaded: LoadedDataset) -> Sequence[PathStep]:
    if loaded.repetitions is not None:
        return (float(len(loaded.dataset) * loaded.repetitions),)
    return path_of(loaded.weight)
