# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Spliced batches compared with copying the same bytes; finding examples; planning documents."""

import time

import numpy as np
from timing import bytes_of, markdown, microseconds

from energon_ext.batch.collate import BatchAssembler
from energon_ext.splice import MultiSpliceConfig, SpliceIndex
from energon_ext.splice.frames import Frames
from energon_ext.splice.reader import FrameReader
from energon_ext.tokens.documents import Documents

ROWS, SEQ_LEN = 8, 4096
BATCHES, COPIED = 400, 64
LOCATED = 1024
DOCUMENTS = 100_000

CONFIGS = {
    "coverage_balanced, K = 1024": MultiSpliceConfig(content_length=1024, offset_jitter=3),
    "coverage_balanced, K = S, alpha 0.8": MultiSpliceConfig(alpha=0.8),
    "slide_within, K = 1024": MultiSpliceConfig(
        content_start_mode="slide_within", content_length=1024, epoch_length=10**7
    ),
    "slide_within, K = 256, packed": MultiSpliceConfig(
        content_start_mode="slide_within",
        content_length=256,
        epoch_length=10**7,
        pack_contents=True,
    ),
}


def run():
    random = np.random.default_rng(0)
    documents = [random.integers(0, 50_000, n, np.int32) for n in random.integers(500, 50_000, 20)]
    lengths = [len(tokens) for tokens in documents]
    many = random.integers(10, 50_000, DOCUMENTS)
    rows = []
    for name, config in CONFIGS.items():
        began = time.perf_counter()
        SpliceIndex(many, SEQ_LEN, config)
        planning = time.perf_counter() - began
        index = SpliceIndex(lengths, SEQ_LEN, config)
        batches, locating = contenders(documents, index, config)
        times = microseconds(batches, calls=BATCHES) | microseconds(locating, calls=20)
        rows.append(
            (
                name,
                f"{times['copy']:.0f}",
                f"{times['batch']:.0f}",
                f"{times['batch'] / times['copy']:.1f}x",
                f"{ROWS / times['batch'] * 1e6:,.0f}",
                f"{times['locate'] / LOCATED:.2f}",
                f"{planning:.2f}",
            )
        )
    return markdown(
        f"Spliced batches of [{ROWS}, {SEQ_LEN}]",
        (
            "configuration",
            "copying their bytes, µs",
            "batch, µs",
            "batch / copy",
            "frames/s",
            "finding an example, µs",
            f"planning {DOCUMENTS:,} documents, s",
        ),
        rows,
    )


class Many(Documents):
    """Documents in memory."""

    def __init__(self, documents):
        self._documents = documents

    def __len__(self):
        return len(self._documents)

    def lengths(self, numbers):
        return np.array([len(self._documents[number]) for number in numbers])

    def tokens(self, number, start, stop):
        return self._documents[number][start:stop]


def contenders(documents, index, config):
    source = Frames(
        index,
        range(len(documents)),
        ["doc"] * len(documents),
        config=config,
        seq_len=SEQ_LEN,
        epochs=None,
        fingerprint={},
    )
    reader = FrameReader(Many(documents), 0, source.numbers, source.names, config, 0)
    assemble = BatchAssembler(SEQ_LEN)

    def next_batch():
        taken = source.take(ROWS)
        rows = reader.read([taken.description(number) for number in range(ROWS)])
        return assemble(rows, ("doc",))

    # Bytes differ each time, as in a run, so neither side finds them in the processor's cache.
    buffers = [bytes_of(next_batch()).copy() for _ in range(COPIED)]
    numbers = np.arange(LOCATED)

    def batch(calls):
        for _ in range(calls):
            next_batch()

    def copy(calls):
        for number in range(calls):
            buffers[number % len(buffers)].copy()

    def locate(calls):
        for number in range(calls):
            index.locate(numbers + number * len(numbers))

    return {"batch": batch, "copy": copy}, {"locate": locate}
