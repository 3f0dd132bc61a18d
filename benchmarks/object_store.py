# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Token files in an object store that answers each GET after 30 ms.

The store is moto's S3 server behind the proxy of the tests, which answers ranges by itself, in a
process of its own. It is written in Python and shares the machine's cores with the loader: what
the first table shows is bound by it. The second one draws batches at the pace of a training run.
"""

import json
import multiprocessing
import os
import tempfile
import time
from pathlib import Path

from corpora import AnyTokens, random_documents, write_token_file
from megatron.energon import WorkerConfig
from timing import fresh_process, markdown

SEQ_LEN, BATCH_ROWS = 4096, 8
BATCH_TOKENS = SEQ_LEN * BATCH_ROWS
DOCUMENTS = 8000  # about 8 million tokens
DELAY = 0.030
AHEAD = 64 * 2**20
BATCHES, WARM_UP = 20, 3
PACE = 100_000  # tokens a second
MIX = """\
__module__: energon_ext
__class__: ScheduledMetadataset
splits: {train: {path: "msc://store/web"}}
"""
CLIENTS = {"Rust client": {"rust_client": {"allow_http": True}}, "boto3": {}}


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
            (f"{client}, {what}", *fresh_process(as_fast_as_it_goes, folder, url, client, ahead))
            for client in CLIENTS
            for what, ahead in {"64 MiB ahead": AHEAD, "batch by batch": 0}.items()
        ]
        waits = fresh_process(at_a_pace, folder, url, "Rust client")
        here.send("end")
        server.join()
    speed = ("30 ms a GET, one process", "thousand tokens/s", "first batch, s")
    paced = (f"drawn at {PACE:,} tokens/s", "ms")
    return "\n".join(
        [
            markdown("Token files in an object store, as fast as it goes", speed, rows),
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


def loader_of(folder, url, client, ahead):
    place = {"base_path": "corpus", "endpoint_url": url, "region_name": "us-east-1"}
    keys = {"access_key": "key", "secret_key": "secret"}
    profile = {
        "storage_provider": {"type": "s3", "options": {**place, **CLIENTS[client]}},
        "credentials_provider": {"type": "S3Credentials", "options": keys},
    }
    (folder / "msc.json").write_text(json.dumps({"profiles": {"store": profile}}))
    os.environ["MSC_CONFIG"] = str(folder / "msc.json")
    os.environ["ENERGON_EXT_CACHE"] = tempfile.mkdtemp(dir=folder)
    from energon_ext import ExactDataLoader, PackedTaskEncoder, get_train_dataset

    dataset = get_train_dataset(
        folder / "mix.yaml",
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0),
        batch_size=BATCH_ROWS,
        task_encoder=PackedTaskEncoder(AnyTokens(), SEQ_LEN),
    )
    return iter(ExactDataLoader(dataset, read_ahead_bytes=ahead))


def as_fast_as_it_goes(folder, url, client, ahead):
    """Thousand tokens a second after the first steps, and seconds to the first."""
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


def at_a_pace(folder, url, client):
    """How long the steps of a run wait, in its first three and after them."""
    loader = loader_of(folder, url, client, AHEAD)
    waits = []
    for _ in range(WARM_UP + BATCHES):
        begin = time.perf_counter()
        next(loader)
        waits.append(time.perf_counter() - begin)
        time.sleep(max(0.0, BATCH_TOKENS / PACE - waits[-1]))
    parts = {"step 1": waits[:1], "steps 2 and 3": waits[1:WARM_UP], "later": waits[WARM_UP:]}
    return [(f"longest of {what}", f"{max(own) * 1000:.1f}") for what, own in parts.items()] + [
        ("mean of later", f"{sum(waits[WARM_UP:]) / BATCHES * 1000:.1f}")
    ]
