# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Token files in an object store that answers each GET after 30 ms.

The store is moto's S3 server behind the tests' proxy, which answers range requests itself, in a
separate process. It is written in Python and shares the machine's cores with the loader, so it
limits the speeds in the first table. The second table draws batches at the pace of a training run.
"""

import json
import multiprocessing
import os
import tempfile
import time
from pathlib import Path

import numpy as np
from corpora import AnyTokens, random_documents, write_token_file
from megatron.energon import WorkerConfig
from timing import fresh_process, markdown

SEQ_LEN, BATCH_ROWS = 4096, 8
BATCH_TOKENS = SEQ_LEN * BATCH_ROWS
DOCUMENTS = 8000  # about 8 million tokens
DELAY = 0.030
AHEAD = 64 * 2**20
BATCHES, WARM_UP = 20, 3
PACE = 100_000  # tokens per second
READ_ONE_BY_ONE = 100
MIX = """\
__module__: energon_ext
__class__: ScheduledMetadataset
splits: {train: {path: "msc://store/web"}}
"""
CLIENTS = {"Rust client": {"rust_client": {"allow_http": True}}, "boto3": {}}
REQUESTS = {"Rust client": 48, "boto3": 24}


def run():
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "web").mkdir()
        write_token_file(folder / "web" / "part-0", random_documents(DOCUMENTS, seed=0))
        (folder / "mix.yaml").write_text(MIX)
        here, there = multiprocessing.Pipe()
        server = multiprocessing.get_context("spawn").Process(
            target=serve, args=(folder / "web", there), daemon=True
        )
        server.start()
        url = here.recv()
        rows = [
            (
                f"{client}, {REQUESTS[client]} requests, {what}",
                *fresh_process(as_fast_as_possible, folder, url, client, ahead),
            )
            for client in CLIENTS
            for what, ahead in {"64 MiB ahead": AHEAD, "batch by batch": 0}.items()
        ]
        rows += [
            (f"Megatron's IndexedDataset, {client}", *fresh_process(megatrons, folder, url, client))
            for client in CLIENTS
        ]
        waits = fresh_process(at_a_pace, folder, url, "Rust client")
        here.send("end")
        server.join()
    speed = ("30 ms per GET, one process", "thousand tokens/s", "first batch, s")
    paced = (f"drawn at {PACE:,} tokens/s", "ms")
    return "\n".join(
        [
            markdown("Token files in an object store, as fast as possible", speed, rows),
            markdown("Waiting for a batch", paced, waits),
        ]
    )


def serve(folder, pipe):
    from tests.object_store.store import Store

    store = Store()
    store.put(folder, "web")
    store.hold("web/part-0.bin")
    store.delay = DELAY
    pipe.send(store.url)
    pipe.recv()
    store.close()


def use_store(folder, url, client):
    place = {"base_path": "corpus", "endpoint_url": url, "region_name": "us-east-1"}
    keys = {"access_key": "key", "secret_key": "secret"}
    profile = {
        "storage_provider": {"type": "s3", "options": {**place, **CLIENTS[client]}},
        "credentials_provider": {"type": "S3Credentials", "options": keys},
    }
    (folder / "msc.json").write_text(json.dumps({"profiles": {"store": profile}}))
    os.environ["MSC_CONFIG"] = str(folder / "msc.json")
    os.environ["ENERGON_EXT_CACHE"] = tempfile.mkdtemp(dir=folder)


def loader_of(folder, url, client, ahead):
    use_store(folder, url, client)
    from energon_ext import ExactDataLoader, PackedTaskEncoder, get_train_dataset

    dataset = get_train_dataset(
        folder / "mix.yaml",
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0),
        batch_size=BATCH_ROWS,
        task_encoder=PackedTaskEncoder(AnyTokens(), SEQ_LEN),
    )
    requests = REQUESTS[client]
    return iter(ExactDataLoader(dataset, read_ahead_bytes=ahead, read_requests=requests))


def as_fast_as_possible(folder, url, client, ahead):
    """Return thousands of tokens per second after the first steps, and seconds to the first."""
    begin = time.perf_counter()
    loader = loader_of(folder, url, client, ahead)
    next(loader)
    first = time.perf_counter() - begin
    for _ in range(WARM_UP - 1):
        next(loader)
    begin = time.perf_counter()
    for _ in range(BATCHES):
        next(loader)
    speed = BATCHES * BATCH_TOKENS / (time.perf_counter() - begin)
    return f"{speed / 1000:.0f}", f"{first:.1f}"


def megatrons(folder, url, client):
    """Return the same for Megatron-core's own reader, which requests one document at a time."""
    use_store(folder, url, client)
    os.environ["MSC_CONFIG_FILE"] = os.environ["MSC_CONFIG"]
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from megatron.core.datasets.object_storage_utils import ObjectStorageConfig

    begin = time.perf_counter()
    config = ObjectStorageConfig(path_to_idx_cache=os.environ["ENERGON_EXT_CACHE"])
    dataset = IndexedDataset("msc://store/web/part-0", mmap=False, object_storage_config=config)
    order = np.random.default_rng(0).permutation(len(dataset))[:READ_ONE_BY_ONE]
    len(dataset[order[0]])
    first = time.perf_counter() - begin
    begin = time.perf_counter()
    tokens = sum(len(dataset[number]) for number in order[1:])
    return f"{tokens / (time.perf_counter() - begin) / 1000:.0f}", f"{first:.1f}"


def at_a_pace(folder, url, client):
    """Return how long a run waits for a batch, in its first three steps and later."""
    loader = loader_of(folder, url, client, AHEAD)
    waits = []
    for _ in range(WARM_UP + BATCHES):
        begin = time.perf_counter()
        next(loader)
        waits.append(time.perf_counter() - begin)
        time.sleep(max(0.0, BATCH_TOKENS / PACE - waits[-1]))
    parts = {"step 1": waits[:1], "steps 2 and 3": waits[1:WARM_UP], "later steps": waits[WARM_UP:]}
    longest = [(f"longest in {name}", f"{max(part) * 1000:.1f}") for name, part in parts.items()]
    return [*longest, ("mean of later steps", f"{sum(waits[WARM_UP:]) / BATCHES * 1000:.1f}")]
