# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Webdatasets end to end against stock Energon: token arrays as fields, and text through a BPE.

The same two sources for both, one process, loader defaults, a shuffle buffer of 100 documents and a
packing buffer of 512. The text is that of the installed packages; the tokenizer is trained on it.
"""

import tempfile
import time
from pathlib import Path

from corpora import SOURCES, random_documents, write_mixes, write_webdataset
from megatron.energon import Cooker, WorkerConfig, get_savable_loader, stateless
from stock import cook, stock_loader
from timing import markdown, profiled
from token_source import AnyTokens, draw
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from energon_ext import PackedTaskEncoder, get_train_dataset
from energon_ext.cli.corpora import CORPORA
from energon_ext.documents.text import Document
from energon_ext.encoders.tokenizers import HFTokenizer

ROW_LENGTH, BATCH_SIZE = 4096, 8
BATCH_TOKENS = ROW_LENGTH * BATCH_SIZE
DOCUMENTS = 8_000  # of each source
TEXT_BYTES = (16_000, 4000)  # of a document, at most
BYTES_TO_TRAIN_ON = 2_000_000
TEXT_BATCHES = 40
LOADERS = ("energon_ext", "stock Energon")


class TokenFields(PackedTaskEncoder):
    """Reads token arrays instead of text."""

    cookers = [Cooker(cook)]

    @stateless
    def encode_document(self, sample):
        return Document.derive_from(sample, tokens=sample.tokens)


class Clocked(HFTokenizer):
    """Knows how long it took."""

    seconds = 0.0

    def encode_array(self, text):
        begin = time.process_time()
        tokens = super().encode_array(text)
        self.seconds += time.process_time() - begin
        return tokens


def run():
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for seed, source in enumerate(SOURCES):
            arrays = random_documents(DOCUMENTS, seed)
            write_webdataset(folder / "tokens" / source, ({"bin": a.tobytes()} for a in arrays))
        write_mixes(folder / "tokens")
        for num_bytes in TEXT_BYTES:
            texts = installed_texts(num_bytes)
            for source, part in zip(SOURCES, (texts[::2], texts[1::2])):
                samples = ({"txt": text.encode()} for text in part)
                write_webdataset(folder / str(num_bytes) / source, samples)
            write_mixes(folder / str(num_bytes))
        train_tokenizer(texts, folder / "bpe.json")
        return token_fields(folder / "tokens") + "\n" + texts_through_bpe(folder)


def installed_texts(num_bytes):
    documents = [text_of(d.text) for corpus in CORPORA.values() for d in corpus().documents]
    return [
        text[start : start + num_bytes]
        for text in documents
        for start in range(0, len(text), num_bytes)
    ]


def text_of(text):
    return text if isinstance(text, str) else text.decode("utf-8", errors="replace")


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


def our_loader(path, encoder):
    dataset = get_train_dataset(
        path / "ours.yaml",
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0),
        batch_size=BATCH_SIZE,
        shuffle_buffer_size=100,
        task_encoder=encoder,
    )
    return get_savable_loader(dataset)


def their_loader(path, tokenizer=None):
    return stock_loader(
        path / "stock.yaml", row_length=ROW_LENGTH, batch_size=BATCH_SIZE, tokenizer=tokenizer
    )


def tokens_per_second(iterators, batches, turns=10):
    """Tokens that count, padding left out, per second of the processor, over all turns.

    No best turn: a loader hands out many rows of one packing without reading anything in between.
    """
    tokens, seconds = dict.fromkeys(iterators, 0), dict.fromkeys(iterators, 0.0)
    for _ in range(turns):
        for name, iterator in iterators.items():
            begin = time.process_time()
            tokens[name] += sum(tokens_in(next(iterator)) for _ in range(batches // turns))
            seconds[name] += time.process_time() - begin
    return {name: tokens[name] / seconds[name] for name in iterators}


# Token arrays as fields ---------------------------------------------------------------------------


def token_fields(folder):
    ours, theirs = LOADERS
    loaders = {
        ours: lambda: our_loader(folder, TokenFields(AnyTokens(), ROW_LENGTH)),
        theirs: lambda: their_loader(folder),
    }
    rates = tokens_per_second({name: iter(make()) for name, make in loaders.items()}, batches=180)
    rows = []
    for name, make in loaders.items():
        first, *resumes = latencies(make)
        ratio = rates[name] / rates[theirs]
        rows.append((name, f"{rates[name] / 1e6:.2f}", f"{ratio:.2f}x", first, *resumes))
    iterator = iter(loaders[ours]())
    next(iterator)
    profile = profiled(lambda: draw(iterator, 30), lines=12)
    header = (
        "loader",
        "million tokens per CPU second",
        "ratio",
        "first batch, ms",
        *(f"resume after {batches:,} batches, ms" for batches in SAVED_AFTER),
    )
    return markdown("Token arrays in webdatasets", header, rows) + profile


def tokens_in(batch):
    if isinstance(batch, dict):
        return int((batch["tokens"] > 0).sum())
    return sum(batch.tokens_per_source().values())


SAVED_AFTER = (10, 300)


def latencies(make):
    """Milliseconds to the first batch, and to the next one after a resume."""
    loader = make()
    iterator = iter(loader)
    states, drawn = [None], 0
    for batches in SAVED_AFTER:
        draw(iterator, batches - drawn)
        states.append(loader.save_state_rank())
        drawn = batches
    return [
        f"{1000 * min(seconds_to_batch(make, state) for _ in range(3)):.0f}" for state in states
    ]


def seconds_to_batch(make, state):
    begin = time.perf_counter()
    loader = make()
    loader.restore_state_rank(state)
    next(iter(loader))
    return time.perf_counter() - begin


# Text through a BPE -------------------------------------------------------------------------------


def texts_through_bpe(folder):
    rows = []
    for num_bytes in TEXT_BYTES:
        path = folder / str(num_bytes)
        clocks = {name: Clocked(folder / "bpe.json", eos_token="<eos>") for name in LOADERS}
        ours = our_loader(path, PackedTaskEncoder(clocks[LOADERS[0]], ROW_LENGTH))
        iterators = dict(zip(LOADERS, map(iter, (ours, their_loader(path, clocks[LOADERS[1]])))))
        for iterator in iterators.values():
            next(iterator)
        before = {name: clock.seconds for name, clock in clocks.items()}
        rates = tokens_per_second(iterators, batches=TEXT_BATCHES)
        for name, rate in rates.items():
            per_token = (clocks[name].seconds - before[name]) / (TEXT_BATCHES * BATCH_TOKENS)
            rows.append(
                (
                    f"{name}, up to {num_bytes:,} bytes",
                    f"{rate / 1e6:.2f}",
                    f"{per_token * rate:.0%}",
                )
            )
    profile = profiled(lambda: draw(iterators[LOADERS[0]], 30), lines=10)
    header = ("loader, documents", "million tokens per CPU second", "share of the tokenizer")
    gains = batching_gains(folder / "bpe.json")
    return markdown("Text through a BPE of 8192", header, rows) + profile + "\n" + gains


def batching_gains(path):
    tokenizer = HFTokenizer(path, eos_token="<eos>")
    texts = installed_texts(TEXT_BYTES[-1])[:600]
    rows = []
    for number in (1, 8, 64, 512):
        best = float("inf")
        for _ in range(4):
            begin = time.perf_counter()
            for start in range(0, len(texts), number):
                tokenizer.encode_batch(texts[start : start + number])
            best = min(best, time.perf_counter() - begin)
        rows.append((number, best))
    alone = rows[0][1]
    gains = [(number, f"{alone / seconds:.2f}x") for number, seconds in rows]
    return markdown("Texts tokenized together, no worker", ("texts a call", "speed"), gains)


if __name__ == "__main__":
    print(run())
