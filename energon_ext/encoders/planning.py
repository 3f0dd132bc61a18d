# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Everything that building the planned sources of one dataset needs, known before the first."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from energon_ext.config.mix import Entry
from energon_ext.errors import ConfigError
from energon_ext.packing import Packer, saved_packer
from energon_ext.plan.order import EpochOrder
from energon_ext.plan.packed_rows import PackedRows
from energon_ext.plan.rows import Rows
from energon_ext.plan.source import PlannedSource, Reader
from energon_ext.prepare.lengths import LengthTable
from energon_ext.samples.methods import SampleMethods
from energon_ext.tokens.documents import Lengths
from energon_ext.tokens.file_set import TokenFiles

#: Documents of planned sources that are packed together, unless ``packing_buffer_docs`` is more:
#: in total, and the minimum and maximum per source.
BUFFERS_DOCS, LEAST_BUFFER_DOCS, MAX_BUFFER_DOCS = 2**20, 1024, 4096

#: Documents of a block if they are stored in random order, and documents that are mixed.
SHUFFLED_BLOCK_DOCS, MIXED_DOCS = 256, 2**14


@dataclass(frozen=True, kw_only=True)
class Planning:
    """How the sources of one dataset are planned.

    Attributes:
        seed: selects the order of documents and the random choices of samples.
        repeat: whether sources are read again and again, up to ``max_epochs``.
        validating: whether each document is read once, in order.
        row_tokens: positions per row; 0 if rows differ in length.
        buffer_docs: documents that a source packs together.
        block: samples that a plan keeps close together.
        pad_id: token that fills rows; None for the tokenizer's.
        methods: those of the encoder for samples; None if it has only documents.
        lengths: measured lengths of samples, by source key.
        token_files: text that was tokenized, by source key.
    """

    seed: int
    repeat: bool
    validating: bool = False
    row_tokens: int = 0
    buffer_docs: int = field(default_factory=lambda: MAX_BUFFER_DOCS)
    block: int = 1
    pad_id: int | None = None
    methods: SampleMethods | None = None
    lengths: Mapping[str, LengthTable] = field(default_factory=dict)
    token_files: Mapping[str, TokenFiles] = field(default_factory=dict)

    def pack(
        self,
        entry: Entry,
        lengths: Lengths,
        reader: Reader,
        packer: Packer,
        *,
        block: int | None = None,
        kind: str = "planned",
        former_packer: Callable[[Mapping[str, Any]], Packer] | None = saved_packer,
    ) -> PlannedSource:
        """Plan the packed rows of one source.

        Args:
            lengths: of all documents or samples in its files.
            block: see :class:`~energon_ext.plan.order.EpochOrder`; None for documents, whose entry
                and order on disk decide.
            kind, former_packer: see :class:`~energon_ext.plan.packed_rows.PackedRows`.
        """
        first, stop = document_range(entry, len(lengths))
        epochs = self.epochs_of(entry)
        if epochs is not None and epochs != int(epochs):
            raise ConfigError(
                f"{entry.key}: {epochs} repetitions; sources are read in whole epochs."
            )
        order = EpochOrder(
            stop - first,
            f"{self.seed}/{entry.names.shuffle_key}",
            epochs=None if epochs is None else int(epochs),
            shuffled=not self.validating,
            **(blocks_of(entry) if block is None else {"block": block}),
        )
        rows = PackedRows(
            lengths,
            source=entry.key,
            packer=packer,
            order=order,
            buffer_docs=self.buffer_docs,
            first=first,
            excluded=None if self.validating else entry.excluded,
            kind=kind,
            former_packer=former_packer,
        )
        return name_source(entry, rows, reader, stop - first)

    def epochs_of(self, entry: Entry) -> float | None:
        """Return how many times a source is read; None for no limit."""
        return entry.max_epochs if self.repeat else (entry.loaded.repetitions or 1)


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
    if shuffles_over_epochs(entry):
        raise ConfigError(
            f"{entry.dataset.paths[0]}: shuffle_over_epochs_multiplier is only for streamed "
            f"samples; planned sources shuffle each epoch separately."
        )
    subset = getattr(entry.dataset, "subset", None)
    return (0, total) if subset is None else subset.compute_subset(total)


def shuffles_over_epochs(entry: Entry) -> bool:
    """Return True if training asks not to shuffle each epoch separately, as a plan does."""
    dataset = entry.dataset
    return getattr(dataset, "training", True) and getattr(dataset, "shuffle_over_epochs", 1) != 1
