# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Token files end to end against stock Energon and Megatron-core's datasets.

Two sources, equal weights, rows of 4096, batches of 8 rows, all documents in the page cache. Stock
Energon reads the same documents from webdatasets, one sample each. Megatron-core reads the same
files with GPTDataset and BlendedDataset, which give tokens, labels, loss mask and position ids; its
samples are stacked to a batch as its loaders stack them.
"""

import tempfile
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
from megatron.energon import WorkerConfig, get_savable_loader
from stock import stock_loader
from timing import draw, markdown, microseconds
from torch.utils.data import default_collate

from energon_ext import ExactDataLoader, PackedTaskEncoder, get_train_dataset

SEQ_LEN, BATCH_ROWS = 4096, 8
DOCUMENTS = 20_000  # of each source, about 19 million tokens
ROUNDS = 15


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
        for suffix in (".bin", ".idx"):  # Megatron-core puts its index cache beside them
            (folder / "megatron").mkdir(exist_ok=True)
            (folder / "megatron" / name).with_suffix(suffix).symlink_to(folder / f"{name}{suffix}")
    write_mixes(folder)
    write_mixes(folder / "stock")


def speeds(folder):
    stock = folder / "stock" / "stock.yaml"
    workers = [ExactDataLoader(our_dataset(folder, number)) for number in (1, 2)]
    # Iterable, batches of a round.
    contenders = {
        "token files, no worker": (get_savable_loader(our_dataset(folder)), 150),
        "token files, no worker, watchdog off": (
            get_savable_loader(our_dataset(folder), watchdog_timeout_seconds=None),
            150,
        ),
        "token files, 1 worker": (workers[0], 100),
        "token files, 2 workers": (workers[1], 100),
        "stock Energon, its documentation's packing": (
            stock_loader(stock, seq_len=SEQ_LEN, batch_size=BATCH_ROWS),
            10,
        ),
        "Megatron `GPTDataset`, positions reset at documents": (megatron(folder, True), 50),
        "Megatron `GPTDataset`, one mask for all rows": (megatron(folder, False), 50),
    }
    iterators = {name: iter(batches) for name, (batches, _) in contenders.items()}
    for iterator in iterators.values():
        next(iterator)
    draws = {
        name: lambda batches, iterator=iterator: draw(iterator, batches)
        for name, iterator in iterators.items()
    }
    batches = {name: number for name, (_, number) in contenders.items()}
    times = microseconds(draws, batches, ROUNDS)
    for loader in workers:
        loader.close()
    ours = times["token files, no worker"]
    rows = [
        (name, f"{BATCH_ROWS * SEQ_LEN / time:.1f}", f"{time / ours:.1f}x")
        for name, time in times.items()
    ]
    header = ("loader", "million tokens/s", "token files without worker are faster by")
    return markdown(f"Token files, batches of [{BATCH_ROWS}, {SEQ_LEN}]", header, rows)


def our_dataset(folder, num_workers=0):
    return get_train_dataset(
        folder / "ours.yaml",
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=num_workers),
        batch_size=BATCH_ROWS,
        task_encoder=PackedTaskEncoder(AnyTokens(), SEQ_LEN),
    )


def megatron(folder, reset):
    """Batches of Megatron-core's blend of the same files."""
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
    """What GPTDataset asks of a tokenizer."""

    eod = pad = 0
    vocab_size = VOCAB_SIZE
    unique_identifiers = {"class": "none"}
