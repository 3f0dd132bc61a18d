# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Bin packing against the packers of TRL and OLMo-core: time, and how full the rows are.

Everyone packs the same pieces, one buffer after another; ours carries what it leaves to the next.
TRL moves tokens as it packs; it gets one-byte tokens, the smallest there are. Both peers only
have to be importable: ``pip install --no-deps trl ai2-olmo-core``, and ``pip install datasets
transformers`` for what TRL imports.
"""

import contextlib
import logging

import numpy as np
from timing import markdown, microseconds

from energon_ext.packing import BestFitPacker, Pieces
from energon_ext.packing.best_fit import DEFAULT_CARRY
from energon_ext.packing.fill import fill_bins

CAPACITIES = (4096, 8192)  # tokens of a bin; OLMo-core's must be powers of two
BUFFERS = (512, 4096)
DOCUMENTS = 16_384

#: Buffers that the peers pack; OLMo-core builds a tree for each, which takes it long.
PEER_BUFFERS = 8


def run():
    peers = installed_peers()
    rows = []
    for kind in ("web", "SFT", "longer than T/8"):
        for capacity in CAPACITIES:
            for buffer_docs in BUFFERS:
                rows.append(measure(kind, capacity, buffer_docs, peers))
    missing = [name for name in PEERS if name not in peers]
    note = f"\nNot installed here: {', '.join(missing)}.\n" if missing else ""
    return note + markdown(
        f"Bin packing, {DOCUMENTS:,} documents",
        (
            "lengths, tokens of a bin, buffer",
            "`fill_bins`, µs per document",
            "`BestFitPacker`",
            *(f"{name}, µs (ratio)" for name in PEERS),
            "utilisation",
            *(f"utilisation of {name}" for name in PEERS),
        ),
        rows,
    )


def measure(kind, capacity, buffer_docs, peers):
    pieces = documents(kind, capacity)
    lengths = pieces.stops - pieces.starts
    contenders = {
        "fill": lambda _: list(filled(lengths, capacity, buffer_docs)),
        "plan": lambda _: list(planned(pieces, capacity, buffer_docs)),
    }
    buffers = np.split(lengths, range(buffer_docs, len(lengths), buffer_docs))[:PEER_BUFFERS]
    for name, peer in peers.items():
        pack = peer(capacity, buffers)
        contenders[name] = lambda _, pack=pack: [pack(number) for number in range(len(buffers))]
    times = microseconds(contenders, calls=1, rounds=3)
    packed = dict.fromkeys(contenders, len(lengths)) | dict.fromkeys(peers, sum(map(len, buffers)))
    per_document = {name: time / packed[name] for name, time in times.items()}
    return (
        f"{kind}, {capacity}, {buffer_docs}",
        f"{per_document['fill']:.2f}",
        f"{per_document['plan']:.2f}",
        *(
            f"{per_document[name]:.1f} ({per_document[name] / per_document['fill']:.0f}x)"
            if name in peers
            else ""
            for name in PEERS
        ),
        percent(planned(pieces, capacity, buffer_docs), capacity),
        *(percent(contenders[name](1), capacity) if name in peers else "" for name in PEERS),
    )


def documents(kind, capacity):
    random = np.random.default_rng(0)
    if kind == "SFT":
        lengths = random.lognormal(5.8, 0.9, DOCUMENTS)
    else:
        lengths = random.lognormal(6.2, 1.15, DOCUMENTS)
        if kind == "longer than T/8":
            lengths = random.permutation(
                random.lognormal(6.2, 1.15, 40 * DOCUMENTS).clip(max=capacity - 1)
            )
            lengths = lengths[lengths > capacity / 8][:DOCUMENTS]
    lengths = lengths.astype(np.int64) + 1
    numbers = np.arange(len(lengths))
    return Pieces.whole(numbers, numbers, lengths).cut(capacity)


def filled(lengths, capacity, buffer_docs):
    """``(tokens, bins)`` of one buffer after another; what is left meets the next documents."""
    rest, start = lengths[:0], 0
    while start < len(lengths):
        stop = start + buffer_docs - len(rest)
        buffer, start = np.concatenate((rest, lengths[start:stop])), stop
        items, ends = fill_bins(buffer, capacity, keep=int(DEFAULT_CARRY * len(buffer)))
        placed = np.zeros(len(buffer), bool)
        placed[items] = True
        rest = buffer[~placed]
        yield int(buffer[items].sum()), len(ends)


def planned(pieces, capacity, buffer_docs):
    """The same by the packer of token files, which makes rows of the bins."""
    packer = BestFitPacker(capacity - 1)
    rest, start, number = Pieces.none(), 0, 0
    while start < len(pieces):
        stop = start + buffer_docs - len(rest)
        plan = packer.plan(rest, pieces[start:stop], rows_before=number)
        rest, start, number = plan.carried, stop, number + 1
        yield int((plan.pieces.stops - plan.pieces.starts).sum()), len(plan.ends)


def percent(tokens_and_bins, capacity):
    tokens, bins = np.sum(list(tokens_and_bins), axis=0)
    return f"{100 * tokens / (bins * capacity):.3f} %"


# Peers: (capacity, buffers of lengths) -> function(number of a buffer) -> (tokens, bins) ----------


def trl(capacity, buffers):
    import pyarrow
    from trl.data_utils import _pack_bfd

    tables = []
    for lengths in buffers:
        offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
        tokens = pyarrow.array(np.zeros(offsets[-1], np.int8))
        tables.append(pyarrow.table({"input_ids": pyarrow.ListArray.from_arrays(offsets, tokens)}))

    def pack(number):
        return int(buffers[number].sum()), len(_pack_bfd(tables[number], capacity, "split"))

    return pack


def olmo_core(capacity, buffers):
    from olmo_core.data.utils import InstancePacker

    packer = InstancePacker(capacity)
    indices = []
    for lengths in buffers:
        stops = np.cumsum(lengths)
        indices.append(np.stack((stops - lengths, stops), axis=1))

    def pack(number):
        packer.reset()
        bins, _, _ = packer.pack_documents(indices[number])
        return int(buffers[number].sum()), len(bins)

    return pack


PEERS = {"TRL bfd": trl, "OLMo-core": olmo_core}


def installed_peers():
    peers = {}
    logging.disable(logging.WARNING)
    for name, peer in PEERS.items():
        with contextlib.suppress(ImportError):
            peer(8, [np.array([1])])
            peers[name] = peer
    logging.disable(logging.NOTSET)
    return peers


if __name__ == "__main__":
    print(run())
