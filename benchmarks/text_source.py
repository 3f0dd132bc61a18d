# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Webdatasets end to end against stock Energon: token arrays as fields, and text through a BPE.

The same two sources for both, one process, loader defaults, a shuffle buffer of 100 documents and a
packing buffer of 64, which is filled many times while the clock runs. The text is that of the demo;
the tokenizer is trained on it.
"""

import tempfile
import time
from pathlib import Path

from corpora import SOURCES, AnyTokens, random_documents, write_mixes, write_webdataset
from demo_corpora import CORPORA
from megatron.energon import Cooker, WorkerConfig, get_savable_loader, stateless
from stock import cook, stock_loader
from timing import markdown
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from energon_ext import PackedTaskEncoder, get_train_dataset
from energon_ext.encoders.text import Document
from energon_ext.encoders.tokenizers import HFTokenizer

SEQ_LEN, BATCH_ROWS = 4096, 8
DOCUMENTS = 4000  # of each source
TEXT_BYTES = (16_000, 4000)  # of a document, at most
TEXT_DOCUMENTS = 2000
BYTES_TO_TRAIN_ON = 2_000_000
PACKING_BUFFER = 64  # documents
TURNS = 10
OURS, THEIRS = "energon_ext", "stock Energon"


class TokenFields(PackedTaskEncoder):
    """Reads token arrays instead of text."""

    cookers = [Cooker(cook)]

    @stateless
    def encode_document(self, sample):
        return Document.derive_from(sample, tokens=sample.tokens)


class Clocked(HFTokenizer):
    """Knows how long it took, and how many tokens it made."""

    seconds = tokens = 0

    def encode_array(self, text):
        begin = time.process_time()
        tokens = super().encode_array(text)
        self.seconds += time.process_time() - begin
        self.tokens += len(tokens)
        return tokens


def run():
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for seed, source in enumerate(SOURCES):
            arrays = random_documents(DOCUMENTS, seed)
            write_webdataset(folder / source, ({"bin": array.tobytes()} for array in arrays))
        write_mixes(folder)
        rows = compared("token arrays", folder, {OURS: None, THEIRS: None}, 12)
        for num_bytes in TEXT_BYTES:
            path = folder / str(num_bytes)
            texts = texts_of(num_bytes)
            for number, source in enumerate(SOURCES):
                own = texts[number :: len(SOURCES)]
                write_webdataset(path / source, ({"txt": text.encode()} for text in own))
            write_mixes(path)
            bpe = path / "bpe.json"
            train_tokenizer(texts, bpe)
            clocks = {name: Clocked(bpe, eos_token="<eos>") for name in (OURS, THEIRS)}
            rows += compared(f"text of up to {num_bytes:,} bytes", path, clocks, 6)
    header = ("loader, documents", "million tokens per CPU second", "ratio", "share of tokenizer")
    return markdown(f"Webdatasets, batches of [{BATCH_ROWS}, {SEQ_LEN}]", header, rows)


def texts_of(num_bytes):
    """Parts of the demo's texts, from all over them."""
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


def compared(what, path, clocks, batches):
    """Rows of the table: our loader and the stock one, by their tokenizers."""
    kind, tokenizer = (
        (PackedTaskEncoder, clocks[OURS]) if clocks[OURS] else (TokenFields, AnyTokens())
    )
    encoder = kind(tokenizer, SEQ_LEN, packing_buffer_docs=PACKING_BUFFER)
    iterators = {
        OURS: iter(our_loader(path, encoder)),
        THEIRS: iter(
            stock_loader(
                path / "stock.yaml",
                seq_len=SEQ_LEN,
                batch_size=BATCH_ROWS,
                tokenizer=clocks[THEIRS],
                buffer=PACKING_BUFFER,
            )
        ),
    }
    for iterator in iterators.values():
        next(iterator)
    rates = tokens_per_second(iterators, batches)
    return [
        (
            f"{name}, {what}",
            f"{rates[name] / 1e6:.2f}",
            f"{rates[name] / rates[THEIRS]:.2f}x",
            f"{clock.seconds / clock.tokens * rates[name]:.0%}" if clock else "",
        )
        for name, clock in clocks.items()
    ]


def our_loader(path, encoder):
    dataset = get_train_dataset(
        path / "ours.yaml",
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0),
        batch_size=BATCH_ROWS,
        shuffle_buffer_size=100,
        task_encoder=encoder,
    )
    return get_savable_loader(dataset)


def tokens_per_second(iterators, batches):
    """Tokens that count, padding left out, per second of the processor, over all turns.

    No best turn: a loader hands out many rows of one packing without reading anything in between.
    """
    tokens, seconds = dict.fromkeys(iterators, 0), dict.fromkeys(iterators, 0.0)
    for _ in range(TURNS):
        for name, iterator in iterators.items():
            begin = time.process_time()
            tokens[name] += sum(tokens_in(next(iterator)) for _ in range(batches))
            seconds[name] += time.process_time() - begin
    return {name: tokens[name] / seconds[name] for name in iterators}


def tokens_in(batch):
    if isinstance(batch, dict):
        return int((batch["tokens"] > 0).sum())
    return sum(batch.tokens_per_source().values())
