# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Start, memory and state with ten, a thousand and two thousand sources, and ten thousand files.

Token files of web-like documents. Each measurement is made in a process of its own; memory is what
a worker has written and shares with nobody.
"""

import json
import tempfile
import time
from pathlib import Path

import numpy as np
from corpora import write_token_file
from megatron.energon import WorkerConfig
from memory import fresh_process, memory_of
from timing import markdown
from token_source import AnyTokens

from energon_ext import ExactDataLoader, PackedTaskEncoder, get_train_dataset

SEQ_LEN, BATCH_ROWS = 8192, 8
SMALL, LARGE = 300, 20_000  # documents of a source
FILES, DOCUMENTS_OF_A_FILE = 10_000, 20


def run():
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_pairs(folder / "small", 2000, SMALL)
        write_pairs(folder / "large", 20, LARGE)  # listed several times: each entry is a source
        write_pairs(folder / "files", FILES, DOCUMENTS_OF_A_FILE)
        rows = [
            (
                f"{count:,} sources of {documents:,} documents",
                *fresh_process(measure, write_mix(folder / kind, pairs, count)),
            )
            for kind, documents, pairs, count in (
                ("large", LARGE, 20, 10),
                ("large", LARGE, 20, 1000),
                ("small", SMALL, 2000, 2000),
            )
        ]
        path = mix_of(folder / "all.yaml", [folder / "files"])
        rows.append((f"{FILES:,} pairs as one source", *fresh_process(measure, path)))
    header = ("", "first batch, s", "state, MB", "save, ms", "memory of a worker, MiB")
    return markdown("Many sources", header, rows)


def write_pairs(folder, count, documents):
    folder.mkdir()
    rng = np.random.default_rng(0)
    for number in range(count):
        lengths = np.clip(np.exp(rng.normal(5, 1, documents)), 1, 2000).astype(int)
        write_token_file(
            folder / f"p{number:05d}", [np.ones(length, np.uint16) for length in lengths]
        )


def write_mix(folder, pairs, count):
    paths = [folder / f"p{number % pairs:05d}" for number in range(count)]
    return mix_of(folder.parent / f"{count}.yaml", paths)


def mix_of(path, sources):
    blend = [{"path": str(source), "weight": 1} for source in sources]
    head = {"__module__": "energon_ext", "__class__": "ScheduledMetadataset"}
    path.write_text(json.dumps({**head, "splits": {"train": {"interleave": blend}}}))
    return path


def measure(path):
    """Seconds to the first batch, megabytes of a state, ms to save it, MiB of a worker."""
    begin = time.perf_counter()
    alone = loader_of(path, num_workers=0)
    iterator = iter(alone)
    next(iterator)
    first = time.perf_counter() - begin
    for _ in range(300):
        next(iterator)
    begin = time.perf_counter()
    state = alone.state_dict()
    save = (time.perf_counter() - begin) * 1e3
    with_worker = loader_of(path, num_workers=1)
    iterator = iter(with_worker)
    for _ in range(300):
        next(iterator)
    own, _ = memory_of(with_worker._iterator._workers[0].pid)
    with_worker.close()
    return f"{first:.2f}", f"{len(json.dumps(state)) / 1e6:.2f}", f"{save:.0f}", own


def loader_of(path, num_workers):
    dataset = get_train_dataset(
        path,
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=num_workers),
        batch_size=BATCH_ROWS,
        task_encoder=PackedTaskEncoder(AnyTokens(), SEQ_LEN),
    )
    return ExactDataLoader(dataset)


if __name__ == "__main__":
    print(run())
