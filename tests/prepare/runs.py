# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Units of texts in memory, and readers of their output."""

import json
import time

from energon_ext.prepare import token_writer
from energon_ext.prepare.documents import InputDocument, Unit
from energon_ext.prepare.job import Encoded, Job
from energon_ext.prepare.units import run_units
from energon_ext.tokenizers.tokenizers import ByteTokenizer
from energon_ext.tokens.file_set import open_token_files


def memory_unit(texts, name="memory"):
    """Return a unit of texts; ``name`` is its identity."""

    def read():
        for number, text in enumerate(texts):
            yield InputDocument(text, f"{name}[{number}]", len(text))

    return Unit({"path": name}, read)


def bytes_job(**options):
    tokenizer = ByteTokenizer()

    def encode(documents):
        arrays = [tokenizer.encode_array(document.text) for document in documents]
        return [Encoded([(tokens, None)]) for tokens in arrays]

    meta = {"tokenizer": tokenizer.fingerprint(), "vocab_size": tokenizer.vocab_size}

    def open_writer(prefix):
        return token_writer.TokenWriter(prefix, tokenizer.vocab_size)

    return Job(encode, open_writer, meta, dict(options), min_chars=1, **options)


def run(units, output, *, jobs=1, force=False, **options):
    """Prepare units with a byte tokenizer; return prepared.json and the remarks."""
    return run_units(bytes_job(**options), units, output, jobs=jobs, force=force)


def write(texts, output, **options):
    """Prepare texts as one unit."""
    return run([memory_unit(texts)], output, **options)


def read(folder, split):
    """Return the texts of a split in the order of its files."""
    tokens = open_token_files(folder / split)
    return [ByteTokenizer().decode(tokens.document(index)) for index in range(len(tokens))]


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def unfinished(output):
    """Return the finished units of an unfinished run, with their files."""
    accounts = output.parent / f".{output.name}.unfinished" / "accounts"
    return [json.loads(path.read_text()) for path in sorted(accounts.glob("*.json"))]


def wait_for(condition, seconds=60):
    """Return the value of a condition once it is true."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.02)
    return found
