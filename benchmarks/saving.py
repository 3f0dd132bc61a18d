# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""What a save and a resume cost, against stock Energon; what storing states costs a worker."""

import functools
import io
import logging
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.energon import (
    DefaultTaskEncoder,
    TextSample,
    WorkerConfig,
    get_train_dataset,
    stateless,
)
from megatron.energon.epathlib import EPath
from megatron.energon.flavors.webdataset.base_webdataset import BaseWebdatasetFactory
from timing import markdown
from webdataset import ShardWriter

from energon_ext import PackedTaskEncoder
from energon_ext.encoders.tokenizers import ByteTokenizer
from energon_ext.loader.data_loader import ExactDataLoader

SEQ_LEN = 256
BUFFER_DOCS = 64
SOURCES = (10, 100, 1_000)
BATCHES = 400
#: Of a text source, which reads some thousand a second, and of a token file.
DOCUMENTS_READ = {"short": (1_000, 100_000), "tokens": (1_000, 1_000_000)}

HEAD = "__module__: {}\n__class__: {}\nsplits:\n  train:\n    blend:\n"


class StockPacking(DefaultTaskEncoder):
    """Packing as Energon's documentation shows it: a buffer is sorted into full samples."""

    @stateless
    def encode_sample(self, sample: TextSample) -> TextSample:
        return sample

    def select_samples_to_pack(self, samples):
        packs, length = [[]], 0
        for sample in sorted(samples, key=lambda sample: len(sample.text)):
            if length + len(sample.text) > SEQ_LEN and packs[-1]:
                packs.append([])
                length = 0
            packs[-1].append(sample)
            length += len(sample.text)
        return packs

    @stateless
    def pack_selected_samples(self, samples):
        return samples[0]


def run():
    logging.getLogger("energon_ext").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        write_sources(folder, max(SOURCES))
        saves = [row for number in SOURCES for row in save_costs(folder, number)]
        storing = storing_costs(folder)
        growth = growth_costs(folder)
    return "\n".join(
        (
            markdown(
                f"A save after {BATCHES} batches, buffers of {BUFFER_DOCS} documents on",
                ("sources", "", "state, ms", "with torch.save, ms", "KiB", "restore, ms"),
                saves,
            ),
            markdown(
                "A worker that stores a state after every batch, or only where a save asks",
                ("source", "every batch, batches/s", "at saves, batches/s", "faster"),
                storing,
            ),
            markdown(
                "From a built loader to the first batch of a resume",
                ("source", "after documents", "ms", "after documents", "ms", "ratio"),
                growth,
            ),
        )
    )


def write_sources(folder, number):
    """Text sources 0 .. number - 1, all of the same content, one of short texts, a token file."""
    random = np.random.default_rng(0)
    write_texts(folder / "0", random.integers(20, 300, 2000))
    write_texts(folder / "short", random.integers(5, 40, 2000))
    for copy in range(1, number):
        shutil.copytree(folder / "0", folder / str(copy))
    builder = IndexedDatasetBuilder(str(folder / "tokens.bin"), dtype=np.uint16)
    for length in random.integers(20, 300, 200_000).tolist():
        builder.add_document(torch.zeros(length, dtype=torch.int64), [length])
    builder.finalize(str(folder / "tokens.idx"))


def write_texts(folder, lengths):
    folder.mkdir()
    with ShardWriter(f"{folder}/shard_%03d.tar", maxcount=2000, verbose=0) as shards:
        for index, length in enumerate(lengths):
            shards.write({"__key__": f"{index:06d}", "txt": b"a" * int(length)})
    BaseWebdatasetFactory.prepare_dataset(
        EPath(folder),
        ["shard_000.tar"],
        split_parts_patterns=[("train", ".*")],
        progress_fn=lambda items, total: items,
        tar_index_only=False,
        workers=1,
    )
    (folder / ".nv-meta" / "dataset.yaml").write_text(
        "sample_type: {__module__: megatron.energon, __class__: TextSample}\n"
        "field_map: {text: txt}\n"
    )


def save_costs(folder, number):
    ours = folder / "ours.yaml"
    lines = "".join(f"      - {{path: ./{n}, weight: 1}}\n" for n in range(number))
    ours.write_text(HEAD.format("energon_ext", "ScheduledMetadataset") + lines)
    stock = folder / "stock.yaml"
    stock.write_text(HEAD.format("megatron.energon", "MetadatasetV2") + lines)
    found = {}
    for name, load in (
        ("stock Energon", lambda: stock_loader(stock)),
        ("energon_ext", lambda: our_loader(ours)),
    ):
        loader = load()
        batches = iter(loader)
        for _ in range(BATCHES):
            next(batches)
        found[name] = (*cost_of_save(loader), cost_of_restore(load, loader.save_state_rank()))
    stock_cost = found["stock Energon"]
    return [
        (
            f"{number:,}",
            name,
            f"{state:.1f} ({state / stock_cost[0]:.1f}x)",
            f"{saved:.1f} ({saved / stock_cost[1]:.1f}x)",
            f"{size:,.0f}",
            f"{restore:.0f} ({restore / stock_cost[3]:.1f}x)",
        )
        for name, (state, saved, size, restore) in found.items()
    ]


def worker_config(num_workers=0):
    return WorkerConfig(rank=0, world_size=1, num_workers=num_workers)


def stock_loader(path):
    return ExactDataLoader(
        get_train_dataset(
            path,
            worker_config=worker_config(),
            batch_size=8,
            task_encoder=StockPacking(),
            shuffle_buffer_size=BUFFER_DOCS,
            packing_buffer_size=BUFFER_DOCS,
            max_samples_per_sequence=None,
        ),
        watchdog_timeout_seconds=None,
    )


def our_loader(path, num_workers=0, batch_size=8, **options):
    return ExactDataLoader(
        get_train_dataset(
            path,
            worker_config=worker_config(num_workers),
            batch_size=batch_size,
            task_encoder=PackedTaskEncoder(
                ByteTokenizer(), SEQ_LEN, packing_buffer_docs=BUFFER_DOCS
            ),
            shuffle_buffer_size=BUFFER_DOCS,
            max_samples_per_sequence=None,
        ),
        watchdog_timeout_seconds=None,
        **options,
    )


def cost_of_save(loader, rounds=5):
    """Best ms of a state, and of a state in a file; KiB of the file."""
    state_ms, saved_ms = float("inf"), float("inf")
    for _ in range(rounds):
        began = time.perf_counter()
        state = loader.save_state_rank()
        state_ms = min(state_ms, time.perf_counter() - began)
        file = io.BytesIO()
        torch.save(state, file)
        saved_ms = min(saved_ms, time.perf_counter() - began)
    return state_ms * 1e3, saved_ms * 1e3, file.getbuffer().nbytes / 1024


def cost_of_restore(load, state):
    """ms from a built loader to the first batch after a resume."""
    loader = load()
    began = time.perf_counter()
    loader.restore_state_rank(state)
    next(iter(loader))
    return (time.perf_counter() - began) * 1e3


def storing_costs(folder):
    mixes = {"10 text sources": folder / "text.yaml", "token file": folder / "tokens.yaml"}
    lines = "".join(f"      - {{path: ./{n}, weight: 1}}\n" for n in range(10))
    head = HEAD.format("energon_ext", "ScheduledMetadataset")
    mixes["10 text sources"].write_text(head + lines)
    mixes["token file"].write_text(head + "      - {path: ./tokens, weight: 1}\n")
    rows = []
    for name, mix in mixes.items():
        best = {1: 0.0, 200: 0.0}
        for _ in range(3):
            for save_every in best:
                best[save_every] = max(best[save_every], batches_per_second(mix, save_every))
        rows.append((name, f"{best[1]:,.0f}", f"{best[200]:,.0f}", f"{best[200] / best[1]:.1f}x"))
    return rows


def growth_costs(folder):
    rows = []
    for name, wanted_documents in DOCUMENTS_READ.items():
        mix = folder / f"{name}.yaml"
        head = HEAD.format("energon_ext", "ScheduledMetadataset")
        mix.write_text(head + f"      - {{path: ./{name}, weight: 1}}\n")
        # Where garbage is collected depends on the number of the batch, and costs 200 ms.
        load = functools.partial(our_loader, mix, batch_size=64, gc_collect_every_n_steps=0)
        loader = load()
        batches, read, states = iter(loader), 0, []
        for wanted in wanted_documents:
            while read < wanted:
                read += sum(next(batches).documents_per_source().values())
            states.append(loader.save_state_rank())
        # In turn, so that a slow moment of the machine hits both.
        times = [[cost_of_restore(load, state) for state in states] for _ in range(7)]
        few, many = map(min, zip(*times))
        first, second = (f"{wanted:,}" for wanted in wanted_documents)
        rows.append((name, first, f"{few:.1f}", second, f"{many:.1f}", f"{many / few:.2f}x"))
    return rows


def batches_per_second(mix, save_every):
    loader = our_loader(mix, num_workers=1, save_every=save_every)
    batches = iter(loader)
    for _ in range(20):
        next(batches)
    began = time.perf_counter()
    for _ in range(BATCHES):
        next(batches)
    seconds = time.perf_counter() - began
    loader.close()
    return BATCHES / seconds
