# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Bin packing of a stream of documents: how full the rows are, and the cost per document.

Buffers are packed one after another, as in a source, and pieces are carried over to the next one.
The comparison is best-fit decreasing, which closes all bins of a buffer.
"""

import time

import numpy as np
from timing import markdown, microseconds

from energon_ext.packing import BestFitPacker, Pieces
from energon_ext.packing.bins import best_fit

CASES = (  # lengths, tokens of a bin
    ("web", 8192),
    ("web", 4096),
    ("web", 2048),
    ("books", 8192),
    ("SFT", 4096),
    ("longer than T/8", 4096),
)
BUFFERS = (512, 1024, 4096)
DOCUMENTS = 16_384


def run():
    rows = []
    for kind, capacity in CASES:
        found = documents(kind, capacity)
        rows += [measure(kind, found, capacity, buffer) for buffer in BUFFERS]
    return markdown(
        f"Bin packing, {DOCUMENTS:,} documents",
        (
            "lengths, tokens of a bin, buffer",
            "utilisation",
            "µs per document",
            "best-fit decreasing: utilisation",
            "µs per document",
        ),
        rows,
    )


def measure(kind, found, capacity, buffer_docs):
    packers = {"ours": planned, "decreasing": decreasing}
    times = microseconds(
        {
            name: lambda _, pack=pack: pack(found, capacity, buffer_docs)
            for name, pack in packers.items()
        },
        calls=1,
        rounds=3,
        clock=time.process_time,
    )
    cells = [f"{kind}, {capacity}, {buffer_docs}"]
    for name, pack in packers.items():
        tokens, bins = np.sum(pack(found, capacity, buffer_docs), axis=0)
        cells.append(f"{100 * tokens / (bins * capacity):.3f} %")
        cells.append(f"{times[name] / len(found):.2f}")
    return cells


def documents(kind, capacity):
    random = np.random.default_rng(0)
    if kind == "SFT":
        lengths = random.lognormal(5.8, 0.9, DOCUMENTS)
    elif kind == "web":
        lengths = random.lognormal(6.2, 1.15, DOCUMENTS)
    elif kind == "books":
        lengths = random.lognormal(11.0, 1.0, DOCUMENTS)
    else:
        lengths = random.lognormal(6.2, 1.15, 40 * DOCUMENTS).clip(max=capacity - 1)
        lengths = lengths[lengths > capacity / 8][:DOCUMENTS]
    lengths = lengths.astype(np.int64) + 1
    numbers = np.arange(len(lengths))
    return Pieces.whole(numbers, lengths)


def planned(found, capacity, buffer_docs):
    """Return the ``(tokens, bins)`` of each buffer."""
    packer, sizes = BestFitPacker(capacity - 1), []
    rest, start, rows_before = Pieces.none(), 0, 0
    while start < len(found):
        stop = start + max(1, buffer_docs - len(np.unique(rest.documents)))
        plan = packer.plan(rest, found[start:stop], rows_before=rows_before)
        rest, start, rows_before = plan.carried, stop, rows_before + len(plan)
        sizes.append((int((plan.pieces.stops - plan.pieces.starts).sum()), len(plan)))
    return sizes


def decreasing(found, capacity, buffer_docs):
    sizes = []
    for start in range(0, len(found), buffer_docs):
        pieces = found[start : start + buffer_docs].cut(capacity)
        lengths = sorted((pieces.stops - pieces.starts).tolist(), reverse=True)
        sizes.append((sum(lengths), int(best_fit(lengths, capacity).max()) + 1))
    return sizes
