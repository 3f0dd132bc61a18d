# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Start time, states and memory with ten to ten thousand sources, and with ten thousand files.

The token files are in the page cache; most of them are links to a few. Each measurement runs in a
separate process.
"""

import json
import os
import tempfile
import time
from multiprocessing import active_children
from pathlib import Path

import numpy as np
from corpora import AnyTokens, write_token_file
from megatron.energon import WorkerConfig
from timing import draw, fresh_process, markdown, microseconds, private_mib

from energon_ext import ExactDataLoader, PackedTaskEncoder, get_train_dataset

SEQ_LEN, BATCH_ROWS = 8192, 8
FILES_WRITTEN = 4
FEW, MANY = 50, 1000  # batches before a save

#: Folder, number of pairs, documents per pair, and whether each pair is a source.
CASES = (
    ("large", 10, 5000, True),
    ("large", 1000, 5000, True),
    ("small", 10_000, 300, True),
    ("files", 10_000, 20, False),
)


def run():
    rows = []
    with tempfile.TemporaryDirectory() as name:
        for folder, pairs, documents, are_sources in CASES:
            path = Path(name) / f"{folder}_{pairs}"
            path.mkdir()
            write_pairs(path, pairs, documents)
            paths = sorted(file.with_suffix("") for file in path.glob("*.idx"))
            mix = write_mix(path.with_suffix(".yaml"), paths if are_sources else [path])
            what = f"{pairs:,} sources of {documents:,} documents"
            title = what if are_sources else f"{pairs:,} pairs as one source"
            rows.append((title, *fresh_process(measure, mix)))
    header = (
        "",
        "first batch, s",
        "state, MB",
        "save, ms",
        "save with a worker, ms",
        f"resume after {FEW} batches, s",
        f"after {MANY:,} batches, s",
        "ms per batch",
        "with a worker",
        "memory of planner and worker, MiB",
    )
    return markdown(f"Many sources, batches of [{BATCH_ROWS}, {SEQ_LEN}]", header, rows)


def write_pairs(folder, count, documents):
    rng = np.random.default_rng(0)
    for number in range(count):
        prefix = f"{folder}/p{number:05d}"
        if number < FILES_WRITTEN:
            lengths = np.clip(np.exp(rng.normal(5, 1, documents)), 1, 2000).astype(int)
            write_token_file(prefix, [np.ones(length, np.uint16) for length in lengths])
            continue
        for suffix in (".bin", ".idx"):
            os.link(f"{folder}/p{number % FILES_WRITTEN:05d}{suffix}", prefix + suffix)


def write_mix(path, sources):
    blend = [{"path": str(source), "weight": 1} for source in sources]
    head = {"__module__": "energon_ext", "__class__": "ScheduledMetadataset"}
    path.write_text(json.dumps({**head, "splits": {"train": {"interleave": blend}}}))
    return path


def measure(path):
    """Return the columns of the table."""
    first, alone, iterator = start(path)
    draw(iterator, FEW)
    few = alone.state_dict()
    begin = time.perf_counter()
    draw(iterator, MANY)
    batch = (time.perf_counter() - begin) / MANY
    many = alone.state_dict()
    save = save_ms(alone)
    del alone, iterator
    first = min(first, start(path)[0])
    resumes = [min(start(path, state)[0] for _ in range(2)) for state in (few, many)]
    with_worker = batches_of_worker(path)
    return (
        round(first, 2),
        round(len(json.dumps(many)) / 1e6, 2),
        round(save),
        round(with_worker[1]),
        *(round(seconds, 2) for seconds in resumes),
        *(round(ms, 1) for ms in (1e3 * batch, with_worker[0])),
        with_worker[2],
    )


def start(path, state=None):
    """Return the seconds from the YAML to the first batch, the loader and its iterator."""
    begin = time.perf_counter()
    loader = loader_of(path)
    if state is not None:
        loader.load_state_dict(state)
    iterator = iter(loader)
    next(iterator)
    return time.perf_counter() - begin, loader, iterator


def save_ms(loader):
    def save(calls):
        for _ in range(calls):
            json.dumps(loader.state_dict())

    return microseconds({"": save}, calls=1)[""] / 1e3


def batches_of_worker(path):
    """Return ms per batch, ms per save, and the MiB of the planner's process and the worker."""
    loader = loader_of(path, num_workers=1)
    iterator = iter(loader)
    draw(iterator, FEW)
    batch_ms = (
        microseconds({"": lambda calls: draw(iterator, calls)}, calls=FEW, rounds=3)[""] / 1e3
    )
    memory = [private_mib(process.pid) for process in active_children()]
    found = batch_ms, save_ms(loader), " + ".join(map(str, memory))
    loader.close()
    return found


def loader_of(path, num_workers=0):
    dataset = get_train_dataset(
        path,
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=num_workers),
        batch_size=BATCH_ROWS,
        task_encoder=PackedTaskEncoder(AnyTokens(), SEQ_LEN),
    )
    return ExactDataLoader(dataset)
