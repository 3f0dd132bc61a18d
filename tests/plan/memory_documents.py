# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Planned sources over documents in memory, and summaries of their rows."""

from collections import Counter

import numpy as np

from energon_ext.packing import BestFitPacker, SequentialPacker
from energon_ext.plan.order import EpochOrder
from energon_ext.plan.packed_rows import PackedRows
from energon_ext.plan.source import PlannedSource
from energon_ext.tokens.documents import Documents
from energon_ext.tokens.reader import DocumentReader

PACKERS = {"bin": BestFitPacker, "sequential": SequentialPacker}


class ListDocuments(Documents):
    """Documents of given tokens."""

    def __init__(self, documents):
        self._documents = [np.asarray(each) for each in documents]

    def __len__(self):
        return len(self._documents)

    def lengths(self, numbers):
        return np.array([len(self._documents[number]) for number in numbers], np.int64)

    def tokens(self, number, start, stop):
        return self._documents[number][start:stop]


class MemoryDocuments(Documents):
    """Documents of given lengths; token p of document d is ``1000 * d + p``."""

    def __init__(self, lengths, *, with_weights=False):
        self._lengths = np.array(lengths, np.int64)
        self._with_weights = with_weights
        self.num_tokens = int(self._lengths.sum())
        self.looked_up = 0

    def __len__(self):
        return len(self._lengths)

    def lengths(self, numbers):
        self.looked_up += len(numbers)
        return self._lengths[numbers]

    def tokens_in(self, first, stop):
        return int(self._lengths[first:stop].sum())

    def tokens(self, number, start, stop):
        return 1000 * number + np.arange(start, stop)

    def label_weights(self, number, start, stop):
        if not self._with_weights:
            return None
        return (self.tokens(number, start, stop) % 7).astype(np.float32)

    def fingerprint(self):
        return {"documents": len(self), "tokens": self.num_tokens}


def planned(lengths, *, packing="bin", seq_len=16, epochs=None, buffer_docs=8, **options):
    """Return the rows of documents in memory."""
    packer = PACKERS[packing](seq_len, **options.pop("packer_options", {}))
    documents = MemoryDocuments(lengths, with_weights=options.pop("with_weights", False))
    size = len(documents) - options.get("first", 0)
    order = EpochOrder(size, "web", epochs=epochs, shuffled=options.pop("shuffled", True))
    return PackedRows(
        documents, source="web", packer=packer, order=order, buffer_docs=buffer_docs, **options
    )


def reader_of(rows):
    """Return the reader of rows of documents in memory."""
    return DocumentReader(rows.lengths, rows.key, rows._packer.seq_len)


def planned_source(key, lengths, **options):
    """Return a source of documents in memory."""
    rows = planned(lengths, **options)
    return PlannedSource(key, rows, reader_of(rows), documents=len(lengths))


def take(rows, count=None):
    """Return the content of the next ``count`` rows; of all remaining rows by default."""
    taken = rows.take(2**40 if count is None else count)
    return [content(read_of(rows, taken, number)) for number in range(len(taken))]


def read_of(rows, taken, number):
    """Return a taken row with its tokens."""
    (row,) = reader_of(rows).read([taken.description(number)])
    return row


def state_of(rows):
    """Return the current state of a source."""
    return rows.state_at(rows.window, rows.next_row)


def content(row):
    weights = row.label_weights
    if weights is not None:
        weights = [None if each is None else each.tolist() for each in weights]
    return [each.tolist() for each in row.slices], weights, row.documents, row.num_tokens


def trained(contents):
    """Count how often each pair of adjacent tokens of a document is in a row."""
    return Counter(
        (a, b) for slices, *_ in contents for tokens in slices for a, b in zip(tokens, tokens[1:])
    )


def pairs(lengths, times=1):
    """Return what :func:`trained` counts if every document was read ``times`` times."""
    return Counter(
        {
            (1000 * d + p, 1000 * d + p + 1): times
            for d, length in enumerate(lengths)
            for p in range(length - 1)
        }
    )


def documents_in(contents):
    """Count the documents that ended."""
    return sum(documents for _, _, documents, _ in contents)
