# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""How the documents of a unit become token files, one pair for each split."""

import hashlib
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from energon_ext.documents.permutation import stable_hash
from energon_ext.errors import ConfigError, SampleError, log_of
from energon_ext.prepare.documents import InputDocument, Unit

logger = log_of(__name__)

#: Bytes and number of documents that are tokenized together.
BATCH_BYTES = 2**20
BATCH_DOCUMENTS = 4096

#: Refused documents in a row that end a preparation, as they end a run of Energon.
MOST_REFUSED_IN_A_ROW = 100

#: Token ids, and the weights of the labels, None for 1 everywhere; or why the document is refused.
Encoded = tuple[np.ndarray, np.ndarray | None] | SampleError

#: Work on a unit that was killed may lie in a folder of this name and the unit's until the next
#: process that makes the unit removes it.
STAGING = ".staging-"

#: JSON values.
Record = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """The treatment of every document."""

    encode: Callable[[Sequence[InputDocument]], Sequence[Encoded]]
    writer: Callable[[Path], Any]  # of the files of a prefix: a TokenWriter or a LengthWriter
    meta: Mapping[str, Any]  # for the .meta.json beside each pair
    options: Mapping[str, Any]  # JSON values on which the files depend beside the input
    val_fraction: float = 0.0  # of the documents that are in no split, by a hash of their text
    seed: int = 0  # of that hash
    min_chars: int = 0  # of a document that counts, but white space at the ends
    skips_unreadable: bool = False  # leaves out and counts what cannot be read; else an error
    keeps_all: bool = False  # a refused document has no tokens, in place of being left out


def write_unit(
    job: Job, unit: Unit, name: str, folder: Path, advance: Callable[[int], None]
) -> Record:
    """Write a unit as FOLDER/SPLIT/NAME.bin and so on; complete files appear there, or none.

    Returns the counts, and size and SHA-256 of each file.
    """
    # Documents that are in no file, or have no token in it, and why the first one is.
    losses: Record = {"too_short": 0, "unreadable": {"count": 0, "first": ""}}
    losses["refused"] = {"count": 0, "first": ""}
    characters = Counter[str]()
    writers: dict[str, Any] = {}
    folder.mkdir(parents=True, exist_ok=True)
    prefix = f"{STAGING}{name}."
    with tempfile.TemporaryDirectory(prefix=prefix, dir=folder) as staging, ExitStack() as opened:
        for document, split, tokens, weights in _encoded(job, unit, losses, advance):
            if split not in writers:
                path = Path(staging, split, name)
                path.parent.mkdir()
                writers[split] = job.writer(path)
                opened.callback(writers[split].abandon)
            writers[split].write(tokens, weights, document.origin)
            characters[split] += len(document.text)
        for writer in writers.values():
            writer.close(job.meta)
        files = {}
        for path in sorted(Path(staging).glob("*/*")):
            file = f"{path.parent.name}/{path.name}"
            files[file] = {"bytes": path.stat().st_size, "sha256": sha256(path)}
        for file in files:
            (folder / file).parent.mkdir(exist_ok=True)
            os.replace(Path(staging, file), folder / file)
    return {
        "documents": {split: writer.num_documents for split, writer in writers.items()},
        "characters": dict(characters),
        "tokens": {split: writer.num_tokens for split, writer in writers.items()},
        **losses,
        "files": files,
    }


def split_of(text: str, val_fraction: float, seed: int) -> str:
    """The split of a document, by a keyed hash of its text, so equal texts are never in both.

    Example:
        >>> [split_of(str(n), val_fraction=0.25, seed=0) for n in range(1000)].count("val")
        242
    """
    return "val" if stable_hash(f"{seed}/{text}") < val_fraction * 2**63 else "train"


def sha256(path: Path) -> str:
    """The hash of a file, read block by block."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _count(lost: Record, error: Exception) -> None:
    lost["count"] += 1
    lost["first"] = lost["first"] or str(error)


def _readable(job: Job, unit: Unit, losses: Record) -> Iterator[InputDocument]:
    """The documents of a unit that are whole and long enough."""
    for found in unit.read():
        document = _checked(found) if isinstance(found, InputDocument) else found
        if isinstance(document, ConfigError):
            if not job.skips_unreadable:
                raise document
            _count(losses["unreadable"], document)
        elif len(document.text.strip()) < job.min_chars:
            losses["too_short"] += 1
        else:
            yield document


def _checked(document: InputDocument) -> InputDocument | ConfigError:
    try:
        document.text.encode()
        return document
    except UnicodeEncodeError as error:
        return ConfigError(
            f"{document.origin}: the text holds half a character (a lone surrogate, "
            f"{document.text[error.start]!r}); mend or remove it."
        )


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
    job: Job, unit: Unit, losses: Record, advance: Callable[[int], None]
) -> Iterator[tuple[InputDocument, str, np.ndarray, np.ndarray | None]]:
    """The documents of a unit with their splits, tokens and weights."""
    refused_in_a_row = 0
    for batch in _batches(_readable(job, unit, losses), advance):
        for document, encoded in zip(batch, job.encode(batch), strict=True):
            if job.keeps_all and not isinstance(encoded, SampleError) and not len(encoded[0]):
                encoded = SampleError(f"Sample {document.origin}: no token.")
            if isinstance(encoded, SampleError):
                _count(losses["refused"], encoded)
                logger.debug("left out: %s", encoded)
                refused_in_a_row += 1
                if refused_in_a_row == MOST_REFUSED_IN_A_ROW:
                    raise ConfigError(
                        f"{unit.description['path']}: {MOST_REFUSED_IN_A_ROW} documents in a row "
                        f"cannot be trained on, the last: {str(encoded).rstrip('.')}. Is this the "
                        f"data of another task?"
                    ) from encoded
                if not job.keeps_all:
                    continue
                encoded = np.zeros(0, np.int64), None
            else:
                refused_in_a_row = 0
            split = document.split or split_of(document.text, job.val_fraction, job.seed)
            yield document, split, *encoded
