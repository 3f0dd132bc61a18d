# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""A mix becomes one blend of streams, in Energon's own order of samples."""

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

from megatron.energon import TaskEncoder, WorkerConfig
from megatron.energon.flavors.base_dataset import SavableDataset
from megatron.energon.wrappers.repeat_dataset import RepeatDataset

from energon_ext.config.mix import Entry, Mix
from energon_ext.config.references import subset_of
from energon_ext.encoders.plan_mix import check_blend
from energon_ext.encoders.quiet import quiet_energon, quiet_errors
from energon_ext.encoders.task import Passes, Task
from energon_ext.errors import ConfigError
from energon_ext.keyed import stable_hash
from energon_ext.mixture.tree import INTERLEAVE
from energon_ext.plan.clock import Clock
from energon_ext.samples.numbered import guard_readers, loader_in
from energon_ext.samples.stored_files import fingerprint_files, num_samples
from energon_ext.streamed.blend import DynamicBlendDataset, LeastConsumedDataset, StreamedBlend
from energon_ext.streamed.samples import RepeatUpTo, num_tokens_of
from energon_ext.streamed.source import StreamedSource
from energon_ext.streamed.spread import Slices, Spread, line_up


def stream_mix(
    mix: Mix,
    task: Task,
    clock: Clock,
    passes: Passes,
    build: Callable[..., SavableDataset],
    size_of: Callable[[Any], float] | None,
    worker_config: WorkerConfig,
) -> StreamedBlend:
    """Open and check all sources of a mix, and return the draw among them.

    Args:
        build: returns the samples of an entry before the draw, as :func:`load_source` does.
        size_of: what an ``interleave`` counts of a sample; None for its tokens.

    Raises:
        ConfigError: the mix has what only planned sources support.
    """
    options = {"worker_config": worker_config, "repeat": passes.repeats_sources}
    sources = [_stream_source(entry, build(entry, **options)) for entry in mix.entries]
    line_up(sources)
    _refuse_steps(mix, sources[0].key)
    check_blend(mix, sources, clock, {}, _absent_sources(sources, worker_config))
    settings = task.spec(mix.entries, worker_config.seed_offset).compared()
    is_interleave = mix.tree.node.rule == INTERLEAVE
    blend_class = LeastConsumedDataset if is_interleave else DynamicBlendDataset
    return blend_class(
        sources,
        worker_config=worker_config,
        tree=mix.tree,
        clock=clock,
        fingerprint={name: value for name, value in settings.items() if name != "seed"},
        size_of=size_of or num_tokens_of,
        repeats=passes.repeats_blend,
        restarts=not passes.repeat,
    )


def load_source(
    task_encoder: TaskEncoder, entry: Entry, worker_config: WorkerConfig, *, repeat: bool
) -> SavableDataset:
    """Load the raw or cooked samples of one source, in an order set by its name and the seed."""
    name_hash = stable_hash(entry.names.shuffle_key)
    config = copy.copy(worker_config)
    config.seed_offset += name_hash
    # Energon gave all factories the same configuration, which seeds their random numbers.
    entry.dataset.worker_config = config
    first = _worker_by_name(entry, config)
    dataset = task_encoder._load_dataset(entry.loaded, first, worker_config=config)
    dataset = quiet_errors(guard_readers(dataset), entry.key, task_encoder.decoder)
    if repeat:
        return RepeatUpTo(dataset, repeats=entry.max_epochs, restart=False, worker_config=config)
    if entry.repetitions == 1:
        return dataset
    return RepeatDataset(dataset, repeats=entry.repetitions, worker_config=config)


def _stream_source(entry: Entry, dataset: SavableDataset) -> StreamedSource:
    return StreamedSource(
        entry.key,
        dataset,
        documents=num_samples(entry.dataset),
        **entry.naming,
        fingerprint=fingerprint_files(entry.dataset),
        spread=_spread_of(entry, dataset),
    )


def _spread_of(entry: Entry, dataset: SavableDataset) -> Spread | None:
    """Return how the samples of :func:`load_source` are spread over workers, to change it."""
    loader = loader_in(dataset)
    if loader is None:
        return None
    count = len(subset_of(entry.dataset, num_samples(entry.dataset)))
    slices_from = functools.partial(_slices_from, entry.dataset)
    return Spread(loader, slices_from, count, _worker_by_name(entry, dataset.worker_config))


def _slices_from(factory: Any, first: int) -> Slices:
    """Return the slices of each worker of this rank if the source begins at a worker."""
    config = factory.worker_config
    with quiet_energon():
        built = factory.build(first % (max(1, config.num_workers) * config.world_size))
    loader = loader_in(built)
    assert loader is not None, "a dataset with a loader is built with one"
    return loader.workers_slice_offsets


def _worker_by_name(entry: Entry, config: WorkerConfig) -> int:
    """Return the worker at which a source began before sources were lined up."""
    workers = max(1, config.num_workers) * config.world_size
    return stable_hash(entry.names.shuffle_key) % workers


def _refuse_steps(mix: Mix, key: str) -> None:
    """Raise ConfigError for what needs planned steps; ``key`` is one of the sources."""
    if (skip := mix.run.skip).ranges:
        raise ConfigError(
            f"{skip.where}: skip: {key} is streamed; only planned sources skip steps."
        )
    if (rows := mix.run.rows) is not None:
        raise ConfigError(
            f"{rows.where}: row_tokens: {key} is streamed; only planned rows change their length."
        )
    for node in mix.tree.nodes():
        if node.live is not None:
            raise ConfigError(
                f"{node.live.path}: a weights_file needs planned steps, but {key} is streamed."
            )


def _absent_sources(
    sources: Sequence[StreamedSource], worker_config: WorkerConfig
) -> dict[str, list[str]]:
    """Return the sources that have no samples for a worker of this rank, by worker."""
    absent = {}
    for worker in range(max(1, worker_config.num_workers)):
        missing = [source.key for source in sources if not source.rows.len_worker(worker)]
        if missing:
            absent[f"worker {worker} of rank {worker_config.rank}"] = missing
    return absent
