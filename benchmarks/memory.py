# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Memory while reading a million documents of token files, and of stock Energon on webdatasets.

Each measurement runs in a separate process, without workers.
"""

import os
import tempfile
from pathlib import Path

from corpora import (
    SOURCES,
    AnyTokens,
    random_documents,
    write_mixes,
    write_token_file,
    write_webdataset,
)
from stock import stock_loader
from text_source import our_loader
from timing import fresh_process, markdown, private_mib

SEQ_LEN, BATCH_ROWS = 4096, 8
DOCUMENTS = 4000  # of each source

#: Number of measurements, and the documents drawn before each one: of token files (a million in
#: total), and of webdatasets, which are a hundred times slower.
STEPS, TOKEN_STEP, FIELD_STEP = 5, 200_000, 4_000


def run():
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for seed, source in enumerate(SOURCES):
            documents = [tokens[:300] for tokens in random_documents(DOCUMENTS, seed)]
            write_token_file(folder / source, documents)
            samples = ({"bin": tokens.tobytes()} for tokens in documents)
            write_webdataset(folder / "fields" / source, samples)
        write_mixes(folder)
        write_mixes(folder / "fields")
        rows = [
            (f"{name}, every {step:,}", *fresh_process(growth, step, make, path))
            for name, step, make, path in (
                ("token files", TOKEN_STEP, tokens, folder),
                ("stock Energon, webdatasets", FIELD_STEP, stock, folder / "fields"),
            )
        ]
    header = ("documents drawn", *(f"after {number}" for number in range(1, STEPS + 1)))
    return markdown("Private memory of a process without workers, MiB", header, rows)


def growth(step, make_loader, path):
    """Return the memory in MiB after every ``step`` documents."""
    iterator = iter(make_loader(path))
    drawn, measured = 0, []
    while len(measured) < STEPS:
        batch = next(iterator)
        is_stock = isinstance(batch, dict)
        drawn += len(batch["cu_seqlens"]) - 1 if is_stock else int(batch.source_documents.sum())
        if drawn >= step * (len(measured) + 1):
            measured.append(private_mib(os.getpid()))
    return measured


def tokens(path):
    return our_loader(path, AnyTokens())


def stock(path):
    return stock_loader(path / "stock.yaml", seq_len=SEQ_LEN, batch_size=BATCH_ROWS)
