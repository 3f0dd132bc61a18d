# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Writing all fields of a batch, compared with copying the bytes of the finished batch.

Consecutive batches differ, as in a run: neither their documents nor their bytes are still in the
processor's cache. The last row repeats a single batch, which stays in the cache.
"""

import numpy as np
from timing import bytes_of, markdown, microseconds

from energon_ext.batch.collate import BatchAssembler
from energon_ext.batch.rows import Row

ROWS, SEQ_LEN = 8, 4096
BATCHES = 64
TOKENS = 20_000_000

#: Mean of the logarithm of document lengths (None: as long as a row), and number of batches.
KINDS = {
    "ragged, web-like": (6.2, BATCHES),
    "ragged, SFT": (5.0, BATCHES),
    "one document per row": (None, BATCHES),
    "ragged, web-like, the same batch again": (6.2, 1),
}


def run():
    table = []
    for name, (mean, number_of_batches) in KINDS.items():
        batches = list(rows_of_batches(mean))[:number_of_batches]
        assemble = BatchAssembler(SEQ_LEN)
        buffers = [bytes_of(assemble(rows, ["web"])).copy() for rows in batches]

        def ours(calls, assemble=assemble, batches=batches):
            for number in range(calls):
                assemble(batches[number % len(batches)], ["web"])

        def copy(calls, buffers=buffers):
            for number in range(calls):
                buffers[number % len(buffers)].copy()

        times = microseconds({"ours": ours, "copy": copy}, calls=4 * BATCHES, rounds=15)
        documents = sum(len(row.slices) for rows in batches for row in rows) / len(batches)
        table.append(
            (
                name,
                f"{documents:.0f}",
                f"{len(buffers[0]) / 1000:.0f}",
                f"{times['copy']:.0f}",
                f"{times['ours']:.0f}",
                f"{times['ours'] / times['copy']:.1f}x",
                f"{ROWS * SEQ_LEN / times['ours']:.0f}",
            )
        )
    header = ("documents", "pieces", "kB", "copy, µs", "assembly, µs", "ratio", "million tokens/s")
    return markdown(f"Assembly of [{ROWS}, {SEQ_LEN}], all fields", header, table)


def rows_of_batches(mean):
    """Yield the rows of many batches, with slices at random places of a large array."""
    random = np.random.default_rng(0)
    tokens = random.integers(0, 50_000, TOKENS).astype(np.uint16)
    for _ in range(BATCHES):
        rows = []
        for _ in range(ROWS):
            lengths, space = [], SEQ_LEN + 1
            while space:
                wanted = space if mean is None else int(random.lognormal(mean, 1.1)) + 1
                lengths.append(min(wanted, space))
                space -= lengths[-1]
            places = random.integers(0, TOKENS - SEQ_LEN - 1, len(lengths))
            slices = [tokens[place : place + n] for place, n in zip(places, lengths)]
            rows.append(Row(slices, source="web", documents=len(slices), num_tokens=SEQ_LEN))
        yield rows
