# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The range, order and epochs of a source's documents, as its entry of a metadataset says."""

from energon_ext.config.mix import Entry
from energon_ext.errors import ConfigError
from energon_ext.plan.rows import Rows
from energon_ext.plan.source import PlannedSource, Reader

#: Documents of planned sources that are packed together, unless ``packing_buffer_docs`` is more:
#: in total, and the minimum and maximum per source.
BUFFERS_DOCS, LEAST_BUFFER_DOCS, MAX_BUFFER_DOCS = 2**20, 1024, 4096

#: Documents of a block if they are stored in random order, and documents that are mixed.
SHUFFLED_BLOCK_DOCS, MIXED_DOCS = 256, 2**14


def blocks_of(entry: Entry) -> dict[str, int]:
    """Return the arguments ``block`` and ``mixed`` of the order of an entry's documents."""
    is_shuffled = entry.documents is not None and entry.documents.is_shuffled
    block = entry.block_docs or (SHUFFLED_BLOCK_DOCS if is_shuffled else 1)
    return {"block": block, "mixed": max(1, MIXED_DOCS // block)}


def name_source(entry: Entry, rows: Rows, reader: Reader, documents: int) -> PlannedSource:
    """Return the rows of an entry as a source, of which an epoch has a number of documents."""
    return PlannedSource(entry.key, rows, reader, documents=documents, **entry.naming)


def count_buffer_docs(sources: int) -> int:
    """Return how many documents each source packs together; a plan reads only their lengths."""
    shared = BUFFERS_DOCS // max(1, sources)
    return min(MAX_BUFFER_DOCS, max(LEAST_BUFFER_DOCS, shared))


def document_range(entry: Entry, total: int) -> tuple[int, int]:
    """Return the range of a source's documents among the ``total`` documents in its files."""
    subset = getattr(entry.dataset, "subset", None)
    return (0, total) if subset is None else subset.compute_subset(total)


def epochs_of(entry: Entry, repeats: bool) -> float | None:
    """Return how many times a source is read; None for no limit.

    Args:
        repeats: whether it is read again and again, up to ``max_epochs``.
    """
    return entry.max_epochs if repeats else (entry.loaded.repetitions or 1)


def check_whole(entry: Entry, epochs: float | None) -> int | None:
    """Raise ConfigError if some documents would be read once more than others; return epochs."""
    if epochs is not None and epochs != int(epochs):
        raise ConfigError(f"{entry.key}: {epochs} repetitions; sources are read in whole epochs.")
    return None if epochs is None else int(epochs)


def check_shuffling(entry: Entry) -> None:
    """Raise ConfigError for a source that asks not to shuffle each epoch separately."""
    if shuffles_over_epochs(entry):
        raise ConfigError(
            f"{entry.dataset.paths[0]}: shuffle_over_epochs_multiplier is only for streamed "
            f"samples; planned sources shuffle each epoch separately."
        )


def shuffles_over_epochs(entry: Entry) -> bool:
    """Return True if training asks not to shuffle each epoch separately, as a plan does."""
    dataset = entry.dataset
    return getattr(dataset, "training", True) and getattr(dataset, "shuffle_over_epochs", 1) != 1
