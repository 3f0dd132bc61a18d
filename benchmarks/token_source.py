# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Token files end to end against stock Energon and Megatron-core's datasets.

Two sources, equal weights, rows of 4096, batches of 8 rows, all documents in the page cache. Stock
Energon reads the same documents from webdatasets, one sample each. Megatron-core reads the same
files with GPTDataset and BlendedDataset, which give tokens, labels, loss mask and position ids; its
samples are stacked to a batch as its loaders stack them.
"""

import gc
import multiprocessing
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
from corpora import (
    SOURCES,
    VOCAB_SIZE,
    random_documents,
    write_mixes,
    write_token_file,
    write_webdataset,
)
from megatron.energon import SavableDataLoader, WorkerConfig, get_savable_loader
from stock import stock_loader
from timing import markdown, profiled

from energon_ext import PackedTaskEncoder, get_train_dataset
from energon_ext.encoders.tokenizers import ByteTokenizer
from energon_ext.loader.data_loader import ExactDataLoader

ROW_LENGTH, BATCH_SIZE = 4096, 8
BATCH_TOKENS = ROW_LENGTH * BATCH_SIZE
DOCUMENTS = 40_000  # of each source, about 37 million tokens


class AnyTokens(ByteTokenizer):
    """Stands for the tokenizer that wrote the files."""

    def __init__(self):
        super().__init__()
        self.vocab_size = VOCAB_SIZE


def run():
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder))
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as fresh_process:
            table = fresh_process.submit(latencies, Path(folder)).result()
        return speeds(Path(folder)) + "\n" + table


def prepare(folder):
    for seed, name in enumerate(SOURCES):
        documents = random_documents(DOCUMENTS, seed)
        write_token_file(folder / name, documents)
        samples = ({"bin": tokens.tobytes()} for tokens in documents[: DOCUMENTS // 4])
        write_webdataset(folder / "stock" / name, samples)
        for suffix in (".bin", ".idx"):  # Megatron-core puts its index cache beside them
            (folder / "megatron").mkdir(exist_ok=True)
            (folder / "megatron" / name).with_suffix(suffix).symlink_to(folder / f"{name}{suffix}")
    write_mixes(folder)
    write_mixes(folder / "stock")


# Speed --------------------------------------------------------------------------------------


def speeds(folder):
    # Name, loader or iterator, batches of a round.
    contenders = {
        "token files, no worker": (lambda: our_loader(folder), 300),
        "token files, no worker, watchdog off": (
            lambda: our_loader(folder, watchdog_timeout_seconds=None),
            300,
        ),
        "token files, stock loader, 1 worker": (lambda: our_loader(folder, 1), 150),
        "token files, ExactDataLoader, 1 worker": (lambda: exact_loader(folder, 1), 150),
        "token files, stock loader, 2 workers": (lambda: our_loader(folder, 2), 150),
        "token files, ExactDataLoader, 2 workers": (lambda: exact_loader(folder, 2), 150),
        "stock Energon, its documentation's packing": (
            lambda: stock_loader(
                folder / "stock" / "stock.yaml", row_length=ROW_LENGTH, batch_size=BATCH_SIZE
            ),
            15,
        ),
        "Megatron GPTDataset, positions reset at documents": (lambda: megatron(folder, True), 60),
        "Megatron GPTDataset, one mask for all rows": (lambda: megatron(folder, False), 60),
    }
    rates = best_rates(contenders)
    ours = rates["token files, no worker"]
    rows = [(name, f"{rate / 1e6:.1f}", f"{ours / rate:.1f}x") for name, rate in rates.items()]
    iterator = iter(our_loader(folder))
    next(iterator)
    profile = profiled(lambda: draw(iterator, 1000), lines=14)
    title = f"Token files, rows of {ROW_LENGTH}, {BATCH_SIZE} rows a batch"
    header = ("loader", "million tokens/s", "token files without worker are faster by")
    return markdown(title, header, rows) + profile


def best_rates(contenders, rounds=7):
    """Tokens per second of each in its best round; they take turns."""
    loaders = {name: make() for name, (make, _) in contenders.items()}
    iterators = {name: iter(loader) for name, loader in loaders.items()}
    for iterator in iterators.values():
        next(iterator)
    best = dict.fromkeys(contenders, 0.0)
    for _ in range(rounds):
        for name, (_, batches) in contenders.items():
            begin = time.perf_counter()
            draw(iterators[name], batches)
            rate = batches * BATCH_TOKENS / (time.perf_counter() - begin)
            best[name] = max(best[name], rate)
    for loader in loaders.values():
        if isinstance(loader, SavableDataLoader):
            ExactDataLoader.close(loader)
    return best


def draw(iterator, batches):
    for _ in range(batches):
        next(iterator)


def our_dataset(folder, num_workers=0):
    return get_train_dataset(
        folder / "ours.yaml",
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=num_workers),
        batch_size=BATCH_SIZE,
        task_encoder=PackedTaskEncoder(AnyTokens(), ROW_LENGTH),
    )


def our_loader(folder, num_workers=0, **options):
    return get_savable_loader(our_dataset(folder, num_workers), **options)


def exact_loader(folder, num_workers):
    return ExactDataLoader(our_dataset(folder, num_workers))


def megatron(folder, reset):
    """Batches of Megatron-core's blend of the same files."""
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from torch.utils.data import default_collate

    config = GPTDatasetConfig(
        random_seed=0,
        sequence_length=ROW_LENGTH,
        blend=([str(folder / "megatron" / name) for name in SOURCES], [1.0, 1.0]),
        split="1,0,0",
        tokenizer=MegatronTokenizer(),
        reset_position_ids=reset,
        reset_attention_mask=False,
        eod_mask_loss=reset,
        create_attention_mask=False,
    )
    samples = 8 * 60 * BATCH_SIZE
    dataset, _, _ = BlendedMegatronDatasetBuilder(
        GPTDataset, [samples, 0, 0], lambda: True, config
    ).build()
    starts = range(0, samples, BATCH_SIZE)
    return (
        default_collate([dataset[start + row] for row in range(BATCH_SIZE)]) for start in starts
    )


class MegatronTokenizer:
    """What GPTDataset asks of a tokenizer."""

    eod = pad = 0
    vocab_size = VOCAB_SIZE
    unique_identifiers = {"class": "none"}


# First batch and resume ---------------------------------------------------------------------------


def latencies(folder):
    """To be run in a fresh process: most of the time is Python's garbage collection.

    Energon's loader collects all garbage before its first batch, which takes the longer, the more
    the process has imported and made so far.
    """
    states = {"first batch": None}
    iterator = iter(loader := our_loader(folder))
    drawn = 0
    for target in (1_000, 1_000_000):
        while drawn < target:
            drawn += int(next(iterator).source_documents.sum())
        states[f"resume after {drawn:,} documents"] = loader.save_state_rank()
    rows = [(name, *map("{:.0f}".format, milliseconds(folder, states[name]))) for name in states]
    header = ("what", "ms", "of them garbage collection")
    return markdown("From the YAML to a batch, stock loader defaults", header, rows)


def milliseconds(folder, state):
    """From the YAML to the first batch, the best of some; and the part of ``gc.collect()``."""
    moments = []
    gc.callbacks.append(lambda phase, info: moments.append(time.perf_counter()))
    best = float("inf"), 0.0
    for _ in range(7):
        gc.unfreeze()  # what a loader before this one had taken out of the collection
        moments.clear()
        begin = time.perf_counter()
        loader = our_loader(folder)
        loader.restore_state_rank(state)
        next(iter(loader))
        total = time.perf_counter() - begin
        best = min(best, (total, sum(moments[1::2]) - sum(moments[::2])))
    gc.callbacks.pop()
    return [1000 * seconds for seconds in best]


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(run())
