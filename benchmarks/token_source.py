# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Token files end to end, compared with stock Energon and Megatron-core's datasets.

There are two sources with equal weights, rows of 4096, and batches of 8 rows; all documents are in
the page cache. Stock Energon reads the same documents from webdatasets, one sample each.
Megatron-core reads the same files with GPTDataset and BlendedDataset, which return tokens, labels,
loss mask and position ids; its samples are stacked into a batch as in its own loaders. Each
contender has a separate process, and they take turns; every loader packs during each round.
"""

import contextlib
import multiprocessing
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from corpora import (
    SOURCES,
    VOCAB_SIZE,
    AnyTokens,
    random_documents,
    write_mixes,
    write_token_file,
    write_webdataset,
)
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.energon import WorkerConfig
from stock import stock_loader
from timing import draw, markdown
from torch.utils.data import default_collate

from energon_ext import ExactDataLoader, PackedTaskEncoder, get_train_dataset

SEQ_LEN, BATCH_ROWS = 4096, 8
BATCH_TOKENS = SEQ_LEN * BATCH_ROWS
DOCUMENTS = 20_000  # of each source, about 19 million tokens
ROUNDS = 9
OURS = "token files, no worker"


def run():
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        return speeds(folder)


def prepare(folder):
    for seed, name in enumerate(SOURCES):
        documents = random_documents(DOCUMENTS, seed)
        write_token_file(folder / name, documents)
        samples = ({"bin": tokens.tobytes()} for tokens in documents[: DOCUMENTS // 4])
        write_webdataset(folder / "stock" / name, samples)
        for suffix in (".bin", ".idx"):  # Megatron-core writes its index cache next to them
            (folder / "megatron").mkdir(exist_ok=True)
            (folder / "megatron" / name).with_suffix(suffix).symlink_to(folder / f"{name}{suffix}")
    write_mixes(folder)
    write_mixes(folder / "stock")


def speeds(folder):
    with contextlib.ExitStack() as stack:
        spawn = multiprocessing.get_context("spawn")
        processes = {
            name: stack.enter_context(ProcessPoolExecutor(1, spawn)) for name in CONTENDERS
        }
        for process, (make, _) in zip(processes.values(), CONTENDERS.values()):
            process.submit(begin, make, folder).result()
        times = dict.fromkeys(CONTENDERS, (float("inf"), float("inf")))
        for _ in range(ROUNDS):
            for name, (_, batches) in CONTENDERS.items():
                found = processes[name].submit(timed, batches).result()
                times[name] = tuple(map(min, times[name], found))
        for process in processes.values():
            process.submit(end).result()
    rows = []
    for name, (wall, processor) in times.items():
        ours = times[OURS]
        row = name, f"{BATCH_TOKENS / wall / 1e6:.1f}", f"{wall / ours[0]:.1f}x"
        of_processor = f"{BATCH_TOKENS / processor / 1e6:.1f}", f"{processor / ours[1]:.1f}x"
        rows.append(
            (*row, *(("", "") if name.endswith(("1 worker", "2 workers")) else of_processor))
        )
    header = ("loader", "million tokens/s", "ours", "million tokens per CPU second", "ours")
    return markdown(f"Token files, batches of [{BATCH_ROWS}, {SEQ_LEN}]", header, rows)


# In the process of a contender --------------------------------------------------------------------


def begin(make, folder):
    global batches_of, iterator
    batches_of = make(folder)
    iterator = iter(batches_of)
    draw(iterator, 10)


def timed(batches):
    """Return seconds and processor seconds per batch."""
    wall, processor = time.perf_counter(), time.process_time()
    draw(iterator, batches)
    return (time.perf_counter() - wall) / batches, (time.process_time() - processor) / batches


def end():
    if isinstance(batches_of, ExactDataLoader):
        batches_of.close()


def token_files(folder):
    return ExactDataLoader(our_dataset(folder))


def one_worker(folder):
    return ExactDataLoader(our_dataset(folder, 1))


def two_workers(folder):
    return ExactDataLoader(our_dataset(folder, 2))


def stock(folder):
    path = folder / "stock" / "stock.yaml"
    return stock_loader(path, seq_len=SEQ_LEN, batch_size=BATCH_ROWS)


def megatron_reset(folder):
    return megatron(folder, True)


def megatron_masked(folder):
    return megatron(folder, False)


def our_dataset(folder, num_workers=0):
    return get_train_dataset(
        folder / "ours.yaml",
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=num_workers),
        batch_size=BATCH_ROWS,
        task_encoder=PackedTaskEncoder(AnyTokens(), SEQ_LEN),
    )


def megatron(folder, reset):
    """Return batches of Megatron-core's blend of the same files."""
    config = GPTDatasetConfig(
        random_seed=0,
        sequence_length=SEQ_LEN,
        blend=([str(folder / "megatron" / name) for name in SOURCES], [1.0, 1.0]),
        split="1,0,0",
        tokenizer=MegatronTokenizer(),
        reset_position_ids=reset,
        reset_attention_mask=False,
        eod_mask_loss=reset,
        create_attention_mask=False,
    )
    samples = (ROUNDS + 1) * 50 * BATCH_ROWS
    dataset, _, _ = BlendedMegatronDatasetBuilder(
        GPTDataset, [samples, 0, 0], lambda: True, config
    ).build()
    starts = range(0, samples, BATCH_ROWS)
    return (
        default_collate([dataset[start + row] for row in range(BATCH_ROWS)]) for start in starts
    )


class MegatronTokenizer:
    """The attributes of a tokenizer that GPTDataset needs."""

    eod = pad = 0
    vocab_size = VOCAB_SIZE
    unique_identifiers = {"class": "none"}


#: The function that creates the batches, and the number of batches per round.
CONTENDERS = {
    OURS: (token_files, 240),
    "token files, 1 worker": (one_worker, 240),
    "token files, 2 workers": (two_workers, 240),
    "stock Energon, its documentation's packing": (stock, 60),
    "Megatron `GPTDataset`, positions reset at documents": (megatron_reset, 50),
    "Megatron `GPTDataset`, one mask for all rows": (megatron_masked, 50),
}
