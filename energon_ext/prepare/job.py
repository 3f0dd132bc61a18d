# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""How the documents of a unit become token files, one pair for each split."""

import hashlib
import logging
import os
import shutil
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from energon_ext.documents.permutation import stable_hash
from energon_ext.errors import ConfigError, SampleError
from energon_ext.prepare.documents import InputDocument, LeftOut, Unit, Unreadable
from energon_ext.prepare.token_writer import TokenWriter

logger = logging.getLogger(__name__)

#: Documents of so many bytes are tokenized together, and at most so many documents.
BATCH_BYTES = 2**20
BATCH_DOCUMENTS = 4096

#: As many refused documents in a row end a preparation, as they end a run of Energon.
MOST_REFUSED_IN_A_ROW = 100

#: Token ids, and the weights of the labels, None for 1 everywhere; or why the document is refused.
Encoded = tuple[np.ndarray, np.ndarray | None] | SampleError

#: Work of a run that was killed may lie here until the next one removes it.
STAGING = ".staging-"


@dataclass(frozen=True)
class Job:
    """What becomes of every document.

    Attributes:
        encode: documents to tokens.
        vocab_size: ids are below it.
        meta: for the ``.meta.json`` beside each pair.
        options: JSON values on which the files depend beside the input.
        weights_dtype: see :class:`~energon_ext.prepare.token_writer.TokenWriter`.
        val_fraction, seed: documents that are in no split go to ``val`` by a hash of their text.
        min_chars: shorter documents are left out; white space at the ends does not count.
        skips_unreadable: leave out and count what cannot be read, in place of an error.
        keeps_all: a refused document has no tokens, in place of being left out.
    """

    encode: Callable[[Sequence[InputDocument]], Sequence[Encoded]]
    vocab_size: int
    meta: Mapping[str, Any]
    options: Mapping[str, Any]
    weights_dtype: str = "uint8"
    val_fraction: float = 0.0
    seed: int = 0
    min_chars: int = 0
    skips_unreadable: bool = False
    keeps_all: bool = False


@dataclass
class UnitCounts:
    """What was made of a unit."""

    documents: Counter[str] = field(default_factory=Counter)  # by split
    characters: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)
    too_short: int = 0
    unreadable: LeftOut = field(default_factory=LeftOut)
    refused: LeftOut = field(default_factory=LeftOut)

    def to_json(self) -> dict[str, Any]:
        return {
            "documents": dict(self.documents),
            "characters": dict(self.characters),
            "tokens": dict(self.tokens),
            "too_short": self.too_short,
            "unreadable": self.unreadable.to_json(),
            "refused": self.refused.to_json(),
        }


def write_unit(
    job: Job, unit: Unit, name: str, folder: Path, advance: Callable[[int], None]
) -> dict[str, Any]:
    """Write a unit as FOLDER/SPLIT/NAME.bin and so on; complete files appear there, or none.

    Args:
        advance: is called with the bytes that were read since it was called last.

    Returns:
        JSON values: the counts, and size and SHA-256 of each file.
    """
    staging = folder / f"{STAGING}{socket.gethostname()}-{os.urandom(6).hex()}"
    staging.mkdir(parents=True)
    unreadable = Unreadable(skip=job.skips_unreadable)
    counts = UnitCounts(unreadable=unreadable)
    writers: dict[str, TokenWriter] = {}
    try:
        try:
            documents = _wanted(unit.read(unreadable), job, counts, unreadable)
            for batch in _batches(documents, advance):
                for document, split, tokens, weights in _encoded(batch, job, counts, unit):
                    if split not in writers:
                        (staging / split).mkdir()
                        prefix = staging / split / name
                        writers[split] = TokenWriter(prefix, job.vocab_size, job.weights_dtype)
                    writers[split].write(tokens, weights, document.origin)
                    counts.documents[split] += 1
                    counts.characters[split] += len(document.text)
                    counts.tokens[split] += len(tokens)
        finally:
            for writer in writers.values():
                writer.abandon()
        for writer in writers.values():
            writer.close(job.meta)
        files = {
            f"{path.parent.name}/{path.name}": {
                "bytes": path.stat().st_size,
                "sha256": sha256(path),
            }
            for path in sorted(staging.glob("*/*"))
        }
        for split in writers:
            (folder / split).mkdir(exist_ok=True)
        for file in files:
            os.replace(staging / file, folder / file)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return {**counts.to_json(), "files": files}


def split_of(text: str, val_fraction: float, seed: int) -> str:
    """The split of a document, by a keyed hash of its text, so equal texts are never in both.

    Example:
        >>> [split_of(str(n), val_fraction=0.25, seed=0) for n in range(1000)].count("val")
        242
    """
    return "val" if stable_hash(f"{seed}/{text}", 64) < val_fraction * 2**64 else "train"


def sha256(path: Path) -> str:
    """The hash of a file, read block by block."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _wanted(
    documents: Iterator[InputDocument], job: Job, counts: UnitCounts, unreadable: Unreadable
) -> Iterator[InputDocument]:
    """The documents that are long enough."""
    for document in documents:
        with unreadable:
            _check_characters(document)
            if len(document.text.strip()) < job.min_chars:
                counts.too_short += 1
            else:
                yield document


def _check_characters(document: InputDocument) -> None:
    try:
        document.text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{document.origin}: the text holds half a character (a lone surrogate, "
            f"{document.text[error.start]!r}); mend or remove it."
        ) from error


def _batches(
    documents: Iterator[InputDocument], advance: Callable[[int], None]
) -> Iterator[list[InputDocument]]:
    batch: list[InputDocument] = []
    num_bytes = 0
    for document in documents:
        batch.append(document)
        num_bytes += document.num_bytes or len(document.text)
        if num_bytes >= BATCH_BYTES or len(batch) == BATCH_DOCUMENTS:
            yield batch
            advance(num_bytes)
            batch, num_bytes = [], 0
    if batch:
        yield batch
        advance(num_bytes)


def _encoded(
    batch: list[InputDocument], job: Job, counts: UnitCounts, unit: Unit
) -> Iterator[tuple[InputDocument, str, np.ndarray, np.ndarray | None]]:
    """The documents of a batch with their splits; those that are refused are counted."""
    refused = counts.refused
    for document, encoded in zip(batch, job.encode(batch), strict=True):
        if job.keeps_all and not isinstance(encoded, SampleError) and not len(encoded[0]):
            encoded = SampleError(f"Sample {document.origin}: no token.")
        if isinstance(encoded, SampleError):
            refused.add(encoded)
            logger.debug("left out: %s", encoded)
            if refused.in_a_row == MOST_REFUSED_IN_A_ROW:
                raise ConfigError(
                    f"{unit.describe()['path']}: {MOST_REFUSED_IN_A_ROW} documents in a row cannot "
                    f"be trained on, the last: {str(encoded).rstrip('.')}. Is this the data of "
                    f"another task?"
                ) from encoded
            if not job.keeps_all:
                continue
            encoded = np.zeros(0, np.int64), None
        else:
            refused.in_a_row = 0
        split = document.split or split_of(document.text, job.val_fraction, job.seed)
        yield document, split, *encoded
