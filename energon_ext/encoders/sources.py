# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The sources of a metadataset, opened and checked."""

import copy
import functools
from typing import Any, Sequence

from megatron.energon import TaskEncoder, WorkerConfig
from megatron.energon.flavors.base_dataset import SavableDataset
from megatron.energon.wrappers.repeat_dataset import RepeatDataset

from energon_ext.arguments import check_integer, choices
from energon_ext.config.mix import Entry, Mix
from energon_ext.encoders.quiet import quiet_energon, quiet_errors
from energon_ext.encoders.text_key import check_text_keys, with_text_key
from energon_ext.errors import ConfigError, log_of
from energon_ext.keyed import stable_hash
from energon_ext.plan.source import PlannedSource, Source
from energon_ext.samples.numbered import ALONE, guard_readers
from energon_ext.samples.stored_files import fingerprint_files, num_samples
from energon_ext.streamed.samples import RepeatUpTo
from energon_ext.streamed.source import StreamedSource
from energon_ext.streamed.spread import Slices, Spread, loader_in
from energon_ext.weights.axis import STEPS

logger = log_of(__name__)


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
    repetitions = entry.loaded.repetitions or 1
    if repetitions == 1:
        return dataset
    return RepeatDataset(dataset, repeats=repetitions, worker_config=config)


def spread_of(entry: Entry, dataset: SavableDataset) -> Spread | None:
    """Return how the samples of :func:`load_source` are spread over workers, to change it."""
    loader = loader_in(dataset)
    if loader is None:
        return None
    total = num_samples(entry.dataset)
    subset = getattr(entry.dataset, "subset", None)
    begin, end = (0, total) if subset is None else subset.compute_subset(total)
    slices_from = functools.partial(_slices_from, entry.dataset)
    return Spread(loader, slices_from, end - begin, _worker_by_name(entry, dataset.worker_config))


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


def open_alone(task_encoder: TaskEncoder, entry: Entry) -> SavableDataset:
    """Open the samples of one source in stored order, as on one rank without workers."""
    task_encoder = with_text_key(task_encoder, entry)
    loaded = copy.copy(entry.loaded)
    loaded.dataset = copy.copy(entry.dataset)
    loaded.dataset.worker_config = ALONE
    with quiet_energon():
        return task_encoder._load_dataset(loaded, 0, worker_config=ALONE)


def open_stored(entry: Entry) -> SavableDataset:
    """Open the samples of one source as they are stored, without cooking them."""
    factory = copy.copy(entry.dataset)
    factory.worker_config = ALONE
    with quiet_energon():
        return factory.build(0)


def stream_source(entry: Entry, dataset: SavableDataset) -> StreamedSource:
    """Return the samples of an entry as a source."""
    return StreamedSource(
        entry.key,
        dataset,
        documents=num_samples(entry.dataset),
        **entry.naming,
        fingerprint=fingerprint_files(entry.dataset),
        spread=spread_of(entry, dataset),
    )


def open_live_weights(mix: Mix, sources: Sequence[Source]) -> None:
    """Read the files of live weights; ConfigError unless steps are planned and counted."""
    for node in mix.tree.nodes():
        if node.live is None:
            continue
        where = f"{node.live.path}: a weights_file"
        if mix.run.axis != STEPS:
            raise ConfigError(
                f"{where} counts steps, but {mix.run.where} counts {mix.run.axis}; remove "
                f"`schedule_axis` or the weights_file."
            )
        for source in sources:
            if not isinstance(source, PlannedSource):
                raise ConfigError(f"{where} needs planned steps, but {source.key} is streamed.")
        node.live.read()


def check_omissions(mix: Mix, sources: Sequence[Source]) -> None:
    """Raise ConfigError if ``skip`` or ``exclude`` does not support a source, or it is missing."""
    skip, exclude = mix.run.skip, mix.run.exclude
    known = [name for source in sources for name in (source.key, source.shown_as) if name]
    for name in exclude.documents:
        if name not in known:
            found = f"no source {name!r}; the sources are {choices(name, known)}"
            raise ConfigError(f"{exclude.where}: exclude: {found}")
    for source in sources:
        if skip.ranges and not isinstance(source, PlannedSource):
            raise ConfigError(
                f"{skip.where}: skip: {source.key} is streamed; only planned sources skip steps."
            )
        is_excluded = exclude.documents_of(source.key, source.shown_as) is not None
        if is_excluded and not (
            isinstance(source, PlannedSource) and source.first_rows.can_exclude
        ):
            raise ConfigError(
                f"{exclude.where}: exclude: {source.key} is streamed or spliced, so its documents "
                f"cannot be excluded."
            )


def absent_sources(sources: Sequence[Source], worker_config: WorkerConfig) -> dict[str, list[str]]:
    """Return the streamed sources that have no samples for a worker of this rank, by worker."""
    streamed = [source for source in sources if isinstance(source, StreamedSource)]
    absent = {}
    for worker in range(max(1, worker_config.num_workers)):
        missing = [source.key for source in streamed if not source.rows.len_worker(worker)]
        if missing:
            absent[f"worker {worker} of rank {worker_config.rank}"] = missing
    return absent


def check_unlimited(entries: Sequence[Entry]) -> None:
    """Raise ConfigError for an epoch limit: without ``repeat`` every source is read once."""
    for entry in entries:
        if entry.max_epochs is not None:
            raise ConfigError(
                f"{entry.where}.max_epochs: {entry.max_epochs} with repeat=False, which reads "
                f"every source once; remove one of the two."
            )


def even_virtual_epoch(length: int, worker_config: WorkerConfig) -> int:
    """Round the length up to an equal number of batches per worker, or their steps diverge."""
    check_integer("virtual_epoch_length", length, 0)
    workers = max(1, worker_config.num_workers)
    even = -(-length // workers) * workers
    if even != length and worker_config.rank == 0:
        logger.info("virtual_epoch_length: %d, from %d, for %d workers", even, length, workers)
    return even


def check_fields(encoder: TaskEncoder, entries: Sequence[Entry]) -> None:
    """Raise ConfigError for fields of entries that need an encoder of text."""
    reject_splices(encoder, entries)
    check_text_keys(encoder, entries)


def reject_splices(encoder: TaskEncoder, entries: Sequence[Entry]) -> None:
    """Raise ConfigError for a ``splice:`` on an entry of the YAML."""
    for entry in entries:
        if entry.splice is not None:
            raise ConfigError(
                f"{entry.splice_where}: {type(encoder).__name__} does not support splices; use an "
                f"energon_ext.PackedTaskEncoder, or remove it."
            )
