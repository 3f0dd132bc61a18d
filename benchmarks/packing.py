# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Bin packing of a stream of documents: how full the rows are, and what it costs a document.

One buffer after another, as a source packs them; what a buffer leaves meets the next documents.
Beside it best-fit decreasing, which closes all bins of a buffer.
"""

import time

import numpy as np
from timing import markdown, microseconds

from energon_ext.packing import BestFitPacker, Pieces, best_fit_decreasing

CAPACITIES = (4096, 8192)  # tokens of a bin
BUFFERS = (512, 1024, 4096)
DOCUMENTS = 16_384


def run():
    rows = []
    for kind in ("web", "SFT", "longer than T/8"):
        for capacity in CAPACITIES:
            pieces = documents(kind, capacity)
            rows += [measure(kind, pieces, capacity, buffer) for buffer in BUFFERS]
    return markdown(
        f"Bin packing, {DOCUMENTS:,} documents",
        (
            "lengths, tokens of a bin, buffer",
            "utilisation",
            "µs a document",
            "of best-fit decreasing",
            "µs a document",
        ),
        rows,
    )


def measure(kind, pieces, capacity, buffer_docs):
    packers = {"ours": planned, "decreasing": decreasing}
    times = microseconds(
        {
            name: lambda _, pack=pack: pack(pieces, capacity, buffer_docs)
            for name, pack in packers.items()
        },
        calls=1,
        rounds=3,
        clock=time.process_time,
    )
    cells = [f"{kind}, {capacity}, {buffer_docs}"]
    for name, pack in packers.items():
        tokens, bins = np.sum(pack(pieces, capacity, buffer_docs), axis=0)
        cells.append(f"{100 * tokens / (bins * capacity):.3f} %")
        cells.append(f"{times[name] / len(pieces):.2f}")
    return cells


def documents(kind, capacity):
    random = np.random.default_rng(0)
    if kind == "SFT":
        lengths = random.lognormal(5.8, 0.9, DOCUMENTS)
    elif kind == "web":
        lengths = random.lognormal(6.2, 1.15, DOCUMENTS)
    else:
        lengths = random.lognormal(6.2, 1.15, 40 * DOCUMENTS).clip(max=capacity - 1)
        lengths = lengths[lengths > capacity / 8][:DOCUMENTS]
    lengths = lengths.astype(np.int64) + 1
    numbers = np.arange(len(lengths))
    return Pieces.whole(numbers, numbers, lengths).cut(capacity)


def planned(pieces, capacity, buffer_docs):
    """``(tokens, bins)`` of one buffer after another."""
    packer, found = BestFitPacker(capacity - 1), []
    rest, start = Pieces.none(), 0
    while start < len(pieces):
        stop = start + buffer_docs - len(rest)
        plan = packer.plan(rest, pieces[start:stop], rows_before=len(found))
        rest, start = plan.carried, stop
        found.append((int((plan.pieces.stops - plan.pieces.starts).sum()), len(plan.ends)))
    return found


def decreasing(pieces, capacity, buffer_docs):
    lengths = (pieces.stops - pieces.starts).tolist()
    buffers = (lengths[at : at + buffer_docs] for at in range(0, len(lengths), buffer_docs))
    return [(sum(buffer), len(best_fit_decreasing(buffer, capacity))) for buffer in buffers]
