# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Memory over a million documents, and of a worker against a worker of stock Energon.

Measured is what a process has written and shares with nobody (``Private_Dirty`` in Linux), and the
shared memory that it has touched. Pages of a memory map belong to the page cache and count for
nobody. Each measurement is made in a process of its own.
"""

import multiprocessing
import os
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from corpora import SOURCES, random_documents, write_mixes, write_token_file, write_webdataset
from megatron.energon import WorkerConfig
from stock import stock_loader
from text_source import TokenFields
from timing import markdown
from token_source import AnyTokens

from energon_ext import PackedTaskEncoder, get_train_dataset
from energon_ext.loader.data_loader import ExactDataLoader

ROW_LENGTH, BATCH_SIZE = 4096, 8
DOCUMENTS = 4000  # of each source
MIB = 2**20

#: Memory is read so often, each time after so many more documents of token files (a million
#: together), and of webdatasets, which take a hundred times as long.
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
        return growth_table(folder) + "\n" + worker_table(folder)


def growth_table(folder):
    tokens = our_loader, folder, PackedTaskEncoder, 0
    fields = our_loader, folder / "fields", TokenFields, 0
    stock = their_loader, folder / "fields", 0
    rows = [
        (f"{name}, every {step:,}", *fresh_process(growth, step, *maker))
        for name, step, maker in (
            ("token files", TOKEN_STEP, tokens),
            ("webdatasets", FIELD_STEP, fields),
            ("stock Energon, webdatasets", FIELD_STEP, stock),
        )
    ]
    header = ("documents drawn", *(f"after {number}" for number in range(1, STEPS + 1)))
    return markdown("Memory of a process without workers, MiB", header, rows)


def worker_table(folder):
    makers = {
        "token files": (our_loader, folder, PackedTaskEncoder),
        "webdatasets": (our_loader, folder / "fields", TokenFields),
        "stock Energon, webdatasets": (their_loader, folder / "fields"),
    }
    rows = [(name, *fresh_process(worker_memory, *maker)) for name, maker in makers.items()]
    header = ("loader", "its own, MiB", "shared memory, MiB")
    return markdown("Memory of one worker after 200 batches", header, rows)


def fresh_process(function, *arguments):
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(function, *arguments).result()


def growth(step, make_loader, *arguments):
    """Own memory, in MiB, each time that ``step`` more documents were drawn."""
    iterator = iter(make_loader(*arguments))
    drawn, measured = 0, []
    while len(measured) < STEPS:
        batch = next(iterator)
        is_stock = isinstance(batch, dict)
        drawn += len(batch["cu_seqlens"]) - 1 if is_stock else int(batch.source_documents.sum())
        if drawn >= step * (len(measured) + 1):
            measured.append(memory_of(os.getpid())[0])
    return measured


def worker_memory(make_loader, *arguments):
    loader = make_loader(*arguments)
    iterator = iter(loader)
    for _ in range(200):
        next(iterator)
    own, shared = memory_of(loader._iterator._workers[0].pid)
    ExactDataLoader.close(loader)
    return own, shared


def memory_of(pid):
    """Memory that only this process has, and shared memory that it uses, in whole MiB."""
    private = field(f"/proc/{pid}/smaps_rollup", "Private_Dirty:")
    return private, field(f"/proc/{pid}/status", "RssShmem:")


def field(path, name):
    for line in Path(path).read_text().splitlines():
        if line.startswith(name):
            return round(int(line.split()[1]) * 1024 / MIB)
    raise LookupError(f"{path} has no {name}")


def our_loader(folder, encoder_class, num_workers=1):
    dataset = get_train_dataset(
        folder / "ours.yaml",
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=num_workers),
        batch_size=BATCH_SIZE,
        shuffle_buffer_size=100,
        task_encoder=encoder_class(AnyTokens(), ROW_LENGTH),
    )
    return ExactDataLoader(dataset)


def their_loader(folder, num_workers=1):
    return stock_loader(
        folder / "stock.yaml",
        row_length=ROW_LENGTH,
        batch_size=BATCH_SIZE,
        num_workers=num_workers,
    )


if __name__ == "__main__":
    print(run())
