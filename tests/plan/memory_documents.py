# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Planned sources over documents in memory, and summaries of their rows."""

from collections import Counter

import numpy as np

from energon_ext.packing import BestFitPacker, SequentialPacker
from energon_ext.plan.order import EpochOrder
from energon_ext.plan.rows import PlannedRows

PACKERS = {"bin": BestFitPacker, "sequential": SequentialPacker}


class MemoryDocuments:
    """Documents of given lengths; token p of document d is ``1000 * d + p``."""

    def __init__(self, lengths, *, with_weights=False):
        self._lengths = np.array(lengths, np.int64)
        self._starts = np.cumsum(self._lengths) - self._lengths
        self._tokens = np.concatenate(
            [np.zeros(0, np.int64), *(1000 * d + np.arange(n) for d, n in enumerate(lengths))]
        )
        self._with_weights = with_weights
        self.num_tokens = int(self._lengths.sum())
        self.looked_up = 0

    def __len__(self):
        return len(self._lengths)

    def locate(self, numbers):
        self.looked_up += len(numbers)
        return self._starts[numbers], self._lengths[numbers]

    def tokens_in(self, first, stop):
        return int(self._lengths[first:stop].sum())

    def tokens(self, place, start, stop):
        return self._tokens[place + start : place + stop]

    def label_weights(self, place, start, stop):
        if not self._with_weights:
            return None
        return (self.tokens(place, start, stop) % 7).astype(np.float32)

    def fingerprint(self):
        return {"documents": len(self), "tokens": self.num_tokens}


def planned(lengths, *, packing="bin", seq_len=16, epochs=None, buffer_docs=8, **options):
    """Return the rows of documents in memory."""
    packer = PACKERS[packing](seq_len, **options.pop("packer_options", {}))
    documents = MemoryDocuments(lengths, with_weights=options.pop("with_weights", False))
    size = len(documents) - options.get("first", 0)
    order = EpochOrder(size, "web", epochs=epochs, shuffled=options.pop("shuffled", True))
    return PlannedRows(
        documents, source="web", packer=packer, order=order, buffer_docs=buffer_docs, **options
    )


def take(rows, count=None):
    """Return the content of the next ``count`` rows; of all remaining rows by default."""
    taken = rows.take(2**40 if count is None else count)
    return [content(read_of(rows, taken, number)) for number in range(len(taken))]


def read_of(rows, taken, number):
    """Return a taken row with its tokens."""
    return rows.read(taken.description(number))


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
