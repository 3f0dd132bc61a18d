# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The samples of a source, opened by number, and what a metadataset says of all its sources."""

import copy
from typing import Sequence

import numpy as np
from megatron.energon import TaskEncoder, WorkerConfig
from megatron.energon.flavors.base_dataset import SavableDataset

from energon_ext.arguments import check_integer, choices
from energon_ext.config.mix import Entry, Mix
from energon_ext.config.references import subset_of
from energon_ext.encoders.quiet import quiet_energon
from energon_ext.encoders.text_key import with_text_key
from energon_ext.errors import ConfigError, log_of
from energon_ext.plan.budget import nested_subset
from energon_ext.plan.source import Source
from energon_ext.samples.numbered import ALONE
from energon_ext.samples.one_each import OneEach
from energon_ext.tokens.documents import Lengths
from energon_ext.weights.axis import STEPS

logger = log_of(__name__)


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


def subset_size(entry: Entry, found: Lengths) -> int | None:
    """Return how many documents the budget of an entry pays for; None for all of its range."""
    if entry.budget is None:
        return None
    documents = subset_of(entry.dataset, len(found))
    known = None if isinstance(found, OneEach) else found
    count = entry.budget.count(entry.key, documents, known)
    return None if count == len(documents) else count


def numbers_of(entry: Entry, found: Lengths) -> range | np.ndarray:
    """Return the numbers of the documents or samples that an entry reads, in stored order."""
    documents = subset_of(entry.dataset, len(found))
    count = subset_size(entry, found)
    if count is None:
        return documents
    return nested_subset(len(documents), count).astype(np.int64) + documents.start


def read_live_weights(mix: Mix) -> None:
    """Read the files of live weights; ConfigError unless the metadataset counts steps."""
    for node in mix.tree.nodes():
        if node.live is None:
            continue
        if mix.run.axis != STEPS:
            raise ConfigError(
                f"{node.live.path}: a weights_file counts steps, but {mix.run.where} counts "
                f"{mix.run.axis}; remove `schedule_axis` or the weights_file."
            )
        node.live.read()


def check_omissions(mix: Mix, sources: Sequence[Source]) -> None:
    """Raise ConfigError if ``exclude`` names a source that is missing or does not support it."""
    check_excluded_names(mix)
    exclude = mix.run.exclude
    for source in sources:
        is_excluded = exclude.documents_of(source.key, source.shown_as) is not None
        if is_excluded and not source.can_exclude:
            raise ConfigError(
                f"{exclude.where}: exclude: {source.key} is streamed or spliced, so its documents "
                f"cannot be excluded."
            )


def check_excluded_names(mix: Mix) -> None:
    """Raise ConfigError if ``exclude`` names a source that is missing."""
    exclude = mix.run.exclude
    known = [name for entry in mix.entries for name in (entry.key, entry.name) if name]
    for name in exclude.documents:
        if name not in known:
            found = f"no source {name!r}; the sources are {choices(name, known)}"
            raise ConfigError(f"{exclude.where}: exclude: {found}")


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
