# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The sources of a metadataset, opened and checked."""

import copy
import functools
from typing import Any, Sequence

from megatron.energon import WorkerConfig
from megatron.energon.flavors.base_dataset import SavableDataset
from megatron.energon.wrappers.repeat_dataset import RepeatDataset

from energon_ext.arguments import check_integer, choices
from energon_ext.config.mix import Entry, Mix
from energon_ext.encoders.quiet import quiet_energon, quiet_errors
from energon_ext.encoders.text_key import check_text_keys, with_text_key
from energon_ext.errors import ConfigError, log_of
from energon_ext.keyed import stable_hash
from energon_ext.plan.order import EpochOrder
from energon_ext.plan.source import PlannedSource, Source
from energon_ext.samples.numbered import ALONE, guard_readers
from energon_ext.samples.stored_files import fingerprint_files, num_samples
from energon_ext.streamed.samples import RepeatUpTo
from energon_ext.streamed.source import StreamedSource
from energon_ext.streamed.spread import Slices, Spread, line_up, loader_in
from energon_ext.weights.axis import STEPS

logger = log_of(__name__)

#: Documents of planned sources that are packed together, unless ``packing_buffer_docs`` is more:
#: in total, and the minimum and maximum per source.
PLANNED_BUFFERS_DOCS, LEAST_PLANNED_BUFFER_DOCS, MAX_PLANNED_BUFFER_DOCS = 2**20, 1024, 4096


def planned_buffer_docs(sources: int) -> int:
    """Return how many documents each source packs together; a plan reads only their lengths."""
    shared = PLANNED_BUFFERS_DOCS // max(1, sources)
    return min(MAX_PLANNED_BUFFER_DOCS, max(LEAST_PLANNED_BUFFER_DOCS, shared))


def document_range(entry: Entry, total: int) -> tuple[int, int]:
    """Return the range of a source's documents among the ``total`` documents in its files."""
    if shuffles_over_epochs(entry):
        raise ConfigError(
            f"{entry.dataset.paths[0]}: shuffle_over_epochs_multiplier is only for streamed "
            f"samples; planned sources shuffle each epoch separately."
        )
    subset = getattr(entry.dataset, "subset", None)
    return (0, total) if subset is None else subset.compute_subset(total)


def shuffles_over_epochs(entry: Entry) -> bool:
    """Return True if a source asks for a shuffle over several epochs at once."""
    return getattr(entry.dataset, "shuffle_over_epochs", 1) not in (1, None, -1)


def epochs_of(entry: Entry, repeat: bool) -> float | None:
    """Return how many times a source is read; None for no limit."""
    return entry.max_epochs if repeat else (entry.loaded.repetitions or 1)


def planned_options(
    task_encoder: Any, entry: Entry, total: int, repeat: bool, *, seed: int, block: int = 1
) -> dict[str, Any]:
    """Return what a source reads and in which order, as arguments of ``PackedRows``.

    Args:
        total: documents or samples in the files of the source.
    """
    first, stop = document_range(entry, total)
    validating, epochs = task_encoder._validating, epochs_of(entry, repeat)
    if epochs is not None and epochs != int(epochs):
        raise ConfigError(f"{entry.key}: {epochs} repetitions; sources are read in whole epochs.")
    order = EpochOrder(
        stop - first,
        f"{seed}/{entry.names.shuffle_key}",
        epochs=None if epochs is None else int(epochs),
        shuffled=not validating,
        block=block,
    )
    excluded = None if validating else entry.excluded
    return {"source": entry.key, "order": order, "first": first, "excluded": excluded}


def load_source(
    task_encoder: Any, entry: Entry, worker_config: WorkerConfig, *, repeat: bool
) -> SavableDataset:
    """Load the raw or cooked samples of one source, in an order set by its name and the seed."""
    name_hash = stable_hash(entry.names.shuffle_key)
    config = copy.copy(worker_config)
    config.seed_offset += name_hash
    # Energon gave all factories the same configuration, which seeds their random numbers.
    entry.dataset.worker_config = config
    first = _worker_by_name(entry, config)
    dataset = task_encoder._load_dataset(entry.loaded, first, worker_config=config)
    dataset = quiet_errors(guard_readers(dataset), entry.key)
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


def open_alone(task_encoder: Any, entry: Entry) -> SavableDataset:
    """Open the samples of one source in stored order, as on one rank without workers."""
    task_encoder = with_text_key(task_encoder, entry)
    loaded = copy.copy(entry.loaded)
    loaded.dataset = copy.copy(entry.dataset)
    loaded.dataset.worker_config = ALONE
    with quiet_energon():
        return task_encoder._load_dataset(loaded, 0, worker_config=ALONE)


def build_sources(
    task_encoder: Any, mix: Mix, worker_config: WorkerConfig, *, repeat: bool
) -> list[Source]:
    """Build the sources of a mix, endless if ``repeat``, and set the encoder's ``source_keys``."""
    sources: list[Any] = []
    for entry in mix.entries:
        built = task_encoder.build_source(entry, worker_config=worker_config, repeat=repeat)
        if not isinstance(built, Source):
            built = StreamedSource(
                entry.key,
                built,
                **names_of_source(entry, num_samples(entry.dataset)),
                fingerprint=fingerprint_files(entry.dataset),
                spread=spread_of(entry, built),
            )
        sources.append(built)
    line_up([source for source in sources if isinstance(source, StreamedSource)])
    task_encoder.source_keys = tuple(sorted({key for s in sources for key in s.parts}))
    return sources


def names_of_source(entry: Entry, documents: int) -> dict[str, Any]:
    """Return what names a source of a blend, and how often it is read."""
    return {
        "documents": documents,
        "max_epochs": entry.max_epochs,
        "names": entry.names,
        "shown_as": entry.name,
    }


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


def check_fields(encoder: Any, entries: Sequence[Entry]) -> None:
    """Raise ConfigError for fields of entries that need an encoder of text."""
    reject_splices(encoder, entries)
    check_text_keys(encoder, entries)


def reject_splices(encoder: Any, entries: Sequence[Entry]) -> None:
    """Raise ConfigError for a ``splice:`` on an entry of the YAML."""
    for entry in entries:
        if entry.splice is not None:
            raise ConfigError(
                f"{entry.splice_where}: {type(encoder).__name__} does not support splices; use an "
                f"energon_ext.PackedTaskEncoder, or remove it."
            )
