# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Text in webdatasets end to end, compared with stock Energon, with a BPE tokenizer.

We tokenize the text once, at first use; stock Energon tokenizes it in every epoch, and shuffles it
in a buffer of 100 documents. Both read the same two sources in one process, with loader defaults
and a packing buffer that is filled many times during the measurement. The text is the demo's; the
tokenizer is trained on it.
"""

import os
import tempfile
import time
from pathlib import Path

from corpora import SOURCES, write_mixes, write_webdataset
from demo_corpora import CORPORA
from megatron.energon import WorkerConfig
from stock import stock_loader
from timing import markdown
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from energon_ext import ExactDataLoader, PackedTaskEncoder, get_train_dataset
from energon_ext.tokenizers.tokenizers import HFTokenizer

SEQ_LEN, BATCH_ROWS = 4096, 8
TEXT_BYTES = (16_000, 4000)  # maximum per document
TEXT_DOCUMENTS = 2000
BYTES_TO_TRAIN_ON = 2_000_000
PACKING_BUFFER = 64  # documents
TURNS, BATCHES = 10, 6
BYTES_PER_TOKEN = 2  # in a token file with a small vocabulary


def run():
    rows = []
    with tempfile.TemporaryDirectory() as name:
        for num_bytes in TEXT_BYTES:
            path = Path(name) / str(num_bytes)
            texts = texts_of(num_bytes)
            for number, source in enumerate(SOURCES):
                own = texts[number :: len(SOURCES)]
                write_webdataset(path / source, ({"txt": text.encode()} for text in own))
            write_mixes(path)
            train_tokenizer(texts, path / "bpe.json")
            rows += compared(f"text of up to {num_bytes:,} bytes", path)
    header = ("loader, documents", "million tokens per CPU second", "ratio")
    return markdown(f"Text in webdatasets, batches of [{BATCH_ROWS}, {SEQ_LEN}]", header, rows)


def texts_of(num_bytes):
    """Return parts of the demo's texts, spread evenly over them."""
    parts = [
        text[start : start + num_bytes]
        for corpus in CORPORA.values()
        for text in corpus()
        for start in range(0, len(text), num_bytes)
    ]
    return parts[:: -(-len(parts) // (TEXT_DOCUMENTS * 16_000 // num_bytes))]


def train_tokenizer(texts, path):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=8192,
        special_tokens=["<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    every = max(1, sum(map(len, texts)) // BYTES_TO_TRAIN_ON)
    tokenizer.train_from_iterator(texts[::every], trainer)
    tokenizer.save(str(path))


def compared(what, path):
    """Return rows of the table: stock Energon, and ours at first use and later."""
    tokenizer = HFTokenizer(path / "bpe.json", eos_token="<eos>")
    stock = stock_loader(
        path / "stock.yaml",
        seq_len=SEQ_LEN,
        batch_size=BATCH_ROWS,
        tokenizer=tokenizer,
        buffer=PACKING_BUFFER,
    )
    os.environ["ENERGON_EXT_CACHE"] = str(path / "cache")
    begin = processor_seconds()
    ours = our_loader(path, tokenizer)
    seconds = processor_seconds() - begin
    tokens = sum(file.stat().st_size for file in (path / "cache").rglob("*.bin")) / BYTES_PER_TOKEN
    rates = {
        "first use, tokenizes everything": tokens / seconds,
        **tokens_per_second({"later": iter(ours), "stock Energon": iter(stock)}),
    }
    return [
        (f"{name}, {what}", f"{rate / 1e6:.2f}", f"{rate / rates['stock Energon']:.2f}x")
        for name, rate in rates.items()
    ]


def processor_seconds():
    """Return the processor time of this process and of those that it waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def our_loader(path, tokenizer):
    dataset = get_train_dataset(
        path / "ours.yaml",
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0),
        batch_size=BATCH_ROWS,
        task_encoder=PackedTaskEncoder(tokenizer, SEQ_LEN, packing_buffer_docs=PACKING_BUFFER),
    )
    return ExactDataLoader(dataset)


def tokens_per_second(iterators):
    """Return tokens without padding per second of processor time, over all turns."""
    for iterator in iterators.values():
        next(iterator)
    tokens, seconds = dict.fromkeys(iterators, 0), dict.fromkeys(iterators, 0.0)
    for _ in range(TURNS):
        for name, iterator in iterators.items():
            begin = time.process_time()
            tokens[name] += sum(tokens_in(next(iterator)) for _ in range(BATCHES))
            seconds[name] += time.process_time() - begin
    return {name: tokens[name] / seconds[name] for name in iterators}


def tokens_in(batch):
    if isinstance(batch, dict):
        return int((batch["tokens"] > 0).sum())
    return sum(batch.tokens_per_source().values())
