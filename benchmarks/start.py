# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The first step over a large pair whose files are not in memory, and the steps after it.

The index is real and the tokens are a sparse file, so that a laptop has room. Each row is a process
of its own, started after the kernel has dropped the files from its cache. Seconds begin after the
imports. "Stored" is one permutation of the whole source, "shuffled" reads the blocks of a source
whose documents are in random order on disk. A start with a catalog is any start but the first.
Megatron's `GPTDataset` is given as many samples as the steps read, and builds its index caches
first; its second start loads them, and so does its fast path.

``python benchmarks/start.py DOCUMENTS [...]`` measures other sizes.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from timing import markdown, private_mib

SIZES = (10**6, 10**7)
ROWS, SEQ_LEN, STEPS = 16_384, 8192, 3
NAMES = {
    "stored": "energon_ext, stored order",
    "shuffled": "energon_ext, shuffled",
    "megatron": "Megatron `GPTDataset`, second start",
    "megatron_fast": "the same with its fast path",
}


def run(sizes=SIZES):
    rows = []
    for documents in sizes:
        with tempfile.TemporaryDirectory() as folder:
            write(Path(folder), documents)
            for name, title in NAMES.items():
                measure(folder, name)  # the first start writes catalogs and caches
                found = measure(folder, name)
                rows.append((f"{documents:.0e}", title, *figures(found)))
    head = (
        "documents",
        "",
        "YAML to first batch, s",
        "later steps, s",
        "read, MB",
        "faults",
        "private MiB",
    )
    steps = f"{STEPS} steps of {ROWS:,} rows of {SEQ_LEN:,}, of which one of 2048 ranks reads 8"
    return markdown(f"A start with cold files: {steps}.", head, rows)


def figures(found):
    seconds = found["first"], found["later"]
    return *(f"{each:.2f}" for each in seconds), *(
        f"{found[n]:,}" for n in ("read", "faults", "private")
    )


def write(folder, documents):
    """Write a pair and the metadatasets that read it in both orders."""
    from energon_ext.tokens.index import write_index

    lengths = np.random.default_rng(0).lognormal(6.2, 1.2, documents).clip(16, 60_000).astype("<i4")
    write_index(f"{folder}/part.idx", np.dtype("<u2"), lengths)
    with open(f"{folder}/part.bin", "wb") as file:
        file.truncate(2 * int(lengths.sum(dtype=np.int64)))
    for name in ("stored", "shuffled"):
        (folder / name).mkdir()
        for suffix in (".idx", ".bin"):
            os.link(f"{folder}/part{suffix}", f"{folder}/{name}/part{suffix}")
        meta = {"tokenizer": {"kind": "bytes", "add_bos": False, "add_eos": True}}
        meta |= {"shuffled": 0} if name == "shuffled" else {}
        (folder / name / "part.meta.json").write_text(json.dumps(meta))
        head = {"__module__": "energon_ext", "__class__": "ScheduledMetadataset"}
        mix = {**head, "splits": {"train": {"path": f"{folder}/{name}/part"}}}
        (folder / f"{name}.yaml").write_text(json.dumps(mix))


def measure(folder, name):
    """Start a process over cold files, and return what it found."""
    for path in Path(folder).rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    command = [sys.executable, __file__, "--child", str(folder), name]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(result.stderr[-2000:])
    return json.loads(result.stdout.splitlines()[-1])


def child(folder, name):
    """Build the dataset, and read the rows of the first rank of 2048 in a few steps."""
    import time

    start = start_ours if name in ("stored", "shuffled") else start_megatron
    prepare = start(Path(folder), name)
    faults, read, begin = major_faults(), bytes_read(), time.perf_counter()
    steps = prepare()
    seconds = []
    for _ in range(STEPS):
        next(steps)
        seconds.append(time.perf_counter() - begin)
        begin = time.perf_counter()
    print(
        json.dumps(
            {
                "first": seconds[0],
                "later": sum(seconds[1:]) / (STEPS - 1),
                "read": (bytes_read() - read) // 10**6,
                "faults": major_faults() - faults,
                "private": private_mib(os.getpid()),
            }
        )
    )


def start_ours(folder, name):
    from megatron.energon import WorkerConfig

    from energon_ext import ExactDataLoader, PackedTaskEncoder, get_train_dataset
    from energon_ext.tokenizers.tokenizers import ByteTokenizer

    def prepare():
        encoder = PackedTaskEncoder(ByteTokenizer(add_bos=False), SEQ_LEN)
        dataset = get_train_dataset(
            folder / f"{name}.yaml",
            worker_config=WorkerConfig(rank=0, world_size=2048, num_workers=0),
            batch_size=1,
            rows_per_step=ROWS,
            task_encoder=encoder,
        )
        batches = iter(ExactDataLoader(dataset))
        while True:
            yield [next(batches) for _ in range(ROWS // 2048)]

    return prepare


def start_megatron(folder, name):
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    def prepare():
        prefix = f"{folder}/stored/part"
        fast = {"fast_cache_load": True, "defer_npy_index_mmap": True} if "fast" in name else {}
        config = GPTDatasetConfig(
            random_seed=0,
            sequence_length=SEQ_LEN,
            blend_per_split=[([prefix], None), None, None],
            path_to_cache=f"{folder}/caches",
            tokenizer=MegatronTokenizer(),
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            create_attention_mask=False,
            mid_level_dataset_surplus=0.005,
            **fast,
        )
        samples = ROWS * STEPS
        dataset, *_ = BlendedMegatronDatasetBuilder(
            GPTDataset, [samples, 0, 0], lambda: True, config
        ).build()
        for step in range(STEPS):
            yield [dataset[step * ROWS + row] for row in range(ROWS // 2048)]

    return prepare


class MegatronTokenizer:
    """The attributes of a tokenizer that GPTDataset needs."""

    eod = pad = 0
    vocab_size = 1 << 16
    unique_identifiers = {"class": "none"}


def major_faults():
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt


def bytes_read():
    return int(Path("/proc/self/io").read_text().split("read_bytes: ")[1].split()[0])


if __name__ == "__main__":
    root = Path(__file__).resolve().parents[1]
    sys.path[:0] = [str(root / "benchmarks"), str(root / "examples"), str(root)]
    if sys.argv[1:2] == ["--child"]:
        child(*sys.argv[2:])
    else:
        print(run([int(float(each)) for each in sys.argv[1:]] or SIZES))
