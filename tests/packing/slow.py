# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Slow references for packing, with plain loops and lists.

A *span* is ``(document, start, stop)``; a row is a list of spans and the number of documents that
end in it.
"""

from collections import deque


def cut(document, length, longest):
    """Return spans of at most ``longest`` tokens that share their boundary token."""
    spans, start = [], 0
    while length:
        stop = min(length, start + longest)
        spans.append((document, start, stop))
        if stop == length:
            break
        start = stop - 1
    return spans


class SequentialPacker:
    """A rolling stream cut into windows of T + 1 tokens at stride T, document by document."""

    def __init__(self, seq_len):
        self.seq_len = seq_len
        self._stream = deque()  # (document, length)
        self._start = 0  # first token of the next window, in the first document
        self._first_is_counted = False
        self._tokens = 0  # from that token on

    def add(self, document, length):
        if length:
            self._stream.append((document, length))
            self._tokens += length

    def flush(self):
        while self._tokens > self.seq_len:
            yield self._take(self.seq_len + 1)
        # A single token that was already a label of the last window trains nothing.
        if self._tokens > 1 or (self._tokens == 1 and not self._first_is_counted):
            yield self._take(self._tokens)

    def _take(self, missing):
        self._tokens -= missing - 1
        spans, ended = [], 0
        while True:
            document, length = self._stream[0]
            stop = min(length, self._start + missing)
            spans.append((document, self._start, stop))
            missing -= stop - self._start
            ended += stop == length and not self._first_is_counted
            if not missing:
                self._start, self._first_is_counted = stop - 1, stop == length
                return spans, ended
            self._stream.popleft()
            self._start, self._first_is_counted = 0, False


def sequential(lengths, seq_len):
    """Return all rows of a stream."""
    packer = SequentialPacker(seq_len)
    for document, length in enumerate(lengths):
        packer.add(document, length)
    return list(packer.flush())


def decreasing(lengths, capacity, prefer, most=None, first=(), documents=None):
    """Put the longest items first, each into the preferred bin with room; O(items x bins).

    Items in ``first`` come before all others. No bin gets two items of one document.
    """
    bins, spaces = [], []
    documents = range(len(lengths)) if documents is None else documents
    for item in sorted(range(len(lengths)), key=lambda i: (i not in first, -lengths[i], i)):
        fitting = [
            index
            for index, space in enumerate(spaces)
            if space >= lengths[item]
            and len(bins[index]) != most
            and documents[item] not in [documents[other] for other in bins[index]]
        ]
        if fitting:
            chosen = min(fitting, key=lambda index: prefer(spaces[index], index))
        else:
            chosen = len(bins)
            bins.append([])
            spaces.append(capacity)
        bins[chosen].append(item)
        spaces[chosen] -= lengths[item]
    return bins


def best_fit_decreasing(lengths, capacity, most=None, first=(), documents=None):
    """Put each item into the fullest bin, or the first of equally full ones."""
    return decreasing(
        lengths, capacity, lambda space, index: (space, index), most, first, documents
    )


def first_fit_decreasing(lengths, capacity):
    """Put each item into the first bin with room."""
    return decreasing(lengths, capacity, lambda space, index: index)


def carried_over(bins, lengths, capacity, carry, due, max_carried):
    """Return the emptiest bins without a due item, up to ``max_carried`` items in total."""
    filled = [sum(lengths[item] for item in items) for items in bins]
    may_stay = [
        index
        for index, items in enumerate(bins)
        if filled[index] < capacity and not due.intersection(items)
    ]
    may_stay.sort(key=lambda index: (filled[index], index))
    staying, count = [], 0
    for index in may_stay[: int(carry * len(bins))]:
        count += len(bins[index])
        if count > max_carried:
            break
        staying.append(index)
    return staying


def best_fit(lengths, seq_len, buffer_docs, carry=0.3, most=None, max_carried=256, epochs=1):
    """Yield the sorted rows of each buffer, which includes the documents carried over."""
    buffer, arrived, epoch, capacity = [], 0, 0, seq_len + 1
    while epoch < epochs:
        num_carried = len(buffer)
        new = max(1, buffer_docs - len({span[0] for span in buffer}))
        for document in range(arrived, min(len(lengths), arrived + new)):
            buffer += cut(document, lengths[document], capacity)
        arrived = min(len(lengths), arrived + new)
        if arrived == len(lengths):
            epoch, arrived = epoch + 1, 0
        sizes = [stop - start for _, start, stop in buffer]
        documents = [span[0] for span in buffer]
        short = [document for document, size in zip(documents, sizes) if size < capacity]
        due = {
            item
            for item in range(num_carried)
            if item < (num_carried + 15) // 16
            or (sizes[item] < capacity and short.count(documents[item]) > 1)
        }
        bins = best_fit_decreasing(sizes, capacity, most, due, documents)
        staying = []
        if epoch < epochs:
            staying = carried_over(bins, sizes, capacity, carry, due, max_carried)
        rows = []
        for items in (items for index, items in enumerate(bins) if index not in staying):
            spans = [buffer[item] for item in items]
            rows.append((spans, sum(stop == lengths[document] for document, _, stop in spans)))
        yield sorted(rows)
        left = sorted(item for index in staying for item in bins[index])
        buffer = [buffer[item] for item in left]
