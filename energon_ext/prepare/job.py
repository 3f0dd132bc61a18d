# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Writes the documents of a unit to token files, one pair per split."""

import json
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from energon_ext.errors import ConfigError, SampleError, log_of, one_line
from energon_ext.keyed import sha256_of_file, stable_hash
from energon_ext.prepare.documents import InputDocument, Unit
from energon_ext.storage.checked_array import write_checksums
from energon_ext.storage.whole_file import fsync, move_files, name_path
from energon_ext.tokens.index import CHECKSUMS

logger = log_of(__name__)

#: Maximum bytes and documents that are tokenized together.
BATCH_BYTES = 2**20
BATCH_DOCUMENTS = 4096

#: Number of consecutive refused documents that stops a preparation, as in Energon.
MAX_REFUSED_IN_A_ROW = 100

#: Token ids, label weights or None if all are 1, and the values of further columns by name, if any.
Arrays = tuple[np.ndarray, np.ndarray | None] | tuple[np.ndarray, Any, Mapping[str, Any]]

#: Prefix of the temporary folder of a unit; the next process on this unit removes leftovers.
STAGING = ".staging-"

#: JSON values.
Record = dict[str, Any]

#: A line per document of a unit that was kept empty because it was refused, with the reason. It is
#: apart from the documents, so that they can be tried again.
FAILURES = ".failures.jsonl"


@dataclass(frozen=True)
class Encoded:
    """A document as it is written: as one document, or as the samples of a conversation."""

    documents: Sequence[Arrays]
    notes: Mapping[str, int] = field(default_factory=dict)  # counts for a summary


#: Kinds of refused documents that a unit counts.
_MAX_KINDS = 20
#: What differs between errors of one kind.
_VALUE = re.compile(r"0x[0-9a-f]+|\d+|'[^']*'|\"[^\"]*\"")


@dataclass(frozen=True)
class Job:
    """How to encode, filter, split and write documents."""

    #: Returns the error of each document that is refused.
    encode: Callable[[Sequence[InputDocument]], Sequence[Encoded | SampleError]]
    writer: Callable[[Path], Any]  # creates a TokenWriter or another writer for a prefix
    meta: Mapping[str, Any]  # content of the .meta.json of each pair
    options: Mapping[str, Any]  # JSON values that the files depend on besides the input
    val_fraction: float = 0.0  # share of documents for val, among those without a fixed split
    seed: int = 0  # of the hash that chooses the split
    min_chars: int = 0  # minimum length of a document without leading and trailing white space
    skips_unreadable: bool = False  # skip and count unreadable documents instead of raising
    #: Keep refused documents as empty ones, and list them, instead of skipping them.
    keeps_all: bool = False
    shuffle: int | None = None  # seed of a random order of all documents; None for input order
    check: Callable[[], None] = lambda: None  # called before units are prepared


def write_unit(
    job: Job, unit: Unit, name: str, folder: Path, advance: Callable[[int], None]
) -> Record:
    """Write a unit to FOLDER/SPLIT/NAME.bin and so on; only complete files appear there.

    Returns the counts, and the size and SHA-256 of each file.
    """
    # Skipped documents by reason: their number, and the error of the first one.
    skipped: Record = {"too_short": 0}
    skipped |= {reason: {"count": 0, "first": ""} for reason in ("unreadable", "refused")}
    skipped["refused"]["kinds"] = {}
    characters, notes = Counter[str](), Counter[str]()
    writers: dict[str, Any] = {}
    failures: list[Record] = []
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as opened:
        opened.enter_context(name_path(folder))
        prefix = f"{STAGING}{name}."
        staging = opened.enter_context(tempfile.TemporaryDirectory(prefix=prefix, dir=folder))
        for place, (document, split, encoded) in enumerate(_encode(job, unit, skipped, advance)):
            if isinstance(encoded, SampleError):
                failures.append({"place": place, "reason": str(encoded)})
                encoded = Encoded([(np.zeros(0, np.int64), None)])
            if split not in writers:
                path = Path(staging, split, name)
                path.parent.mkdir()
                writers[split] = job.writer(path)
                opened.callback(writers[split].abandon)
            for number, (tokens, weights, *own) in enumerate(encoded.documents, start=1):
                answer = f" (sample {number})" if number > 1 else ""
                columns = {**document.columns, **(own[0] if own else {})}
                writers[split].write(tokens, weights, columns, origin=document.origin + answer)
            notes.update(encoded.notes)
            characters[split] += len(document.text)
        for writer in writers.values():
            writer.close(job.meta)
        if failures:
            lines = "".join(json.dumps(each) + "\n" for each in failures)
            Path(staging, split, name + FAILURES).write_text(lines)
        if CHECKSUMS in job.meta:
            for path in Path(staging).glob("*/*.bin"):
                write_checksums(path)
        files = {}
        for path in sorted(Path(staging).glob("*/*")):
            file = f"{path.parent.name}/{path.name}"
            files[file] = {"bytes": path.stat().st_size, "sha256": sha256_of_file(path)}
            fsync(path)  # before the account of the unit says that it is complete
        move_files(files, Path(staging), folder)
    return {
        "documents": {split: writer.num_documents for split, writer in writers.items()},
        "characters": dict(characters),
        "tokens": {split: writer.num_tokens for split, writer in writers.items()},
        "notes": dict(notes),
        **skipped,
        "files": files,
    }


def has_tokens(encoded: Encoded | SampleError) -> bool:
    """Return True for a document that was encoded and has tokens."""
    if isinstance(encoded, SampleError):
        return False
    return any(len(tokens) for tokens, *_ in encoded.documents)


def split_of(text: str, val_fraction: float, seed: int) -> str:
    """Return the split of a document by a keyed hash, so equal texts are always in the same split.

    Example:
        >>> [split_of(str(n), val_fraction=0.25, seed=0) for n in range(1000)].count("val")
        242
    """
    return "val" if stable_hash(f"{seed}/{text}") < val_fraction * 2**63 else "train"


def _count(skipped: Record, error: Exception) -> None:
    skipped["count"] += 1
    skipped["first"] = skipped["first"] or str(error)


def _count_kind(kinds: dict[str, list[Any]], error: SampleError, origin: str) -> None:
    """Count an error among those that differ from it in numbers and quotations only."""
    reason = str(error).removeprefix(f"Sample {origin}: ")
    kind = _VALUE.sub("*", reason)
    if kind in kinds or len(kinds) < _MAX_KINDS:
        kinds.setdefault(kind, [0, str(error)])[0] += 1


def _readable(job: Job, unit: Unit, skipped: Record) -> Iterator[InputDocument]:
    """Yield the documents of a unit that are readable and long enough."""
    for item in unit.read():
        document = _check(item) if isinstance(item, InputDocument) else item
        if isinstance(document, ConfigError):
            if not job.skips_unreadable:
                raise document
            _count(skipped["unreadable"], document)
        elif len(document.text.strip()) < job.min_chars:
            skipped["too_short"] += 1
        else:
            yield document


def _check(document: InputDocument) -> InputDocument | ConfigError:
    try:
        document.text.encode()
        return document
    except UnicodeEncodeError as error:
        return ConfigError(
            f"{document.origin}: the text contains a lone surrogate "
            f"({document.text[error.start]!r}); fix or remove it."
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


def _encode(
    job: Job, unit: Unit, skipped: Record, advance: Callable[[int], None]
) -> Iterator[tuple[InputDocument, str, Encoded | SampleError]]:
    """Yield the documents of a unit with their splits, and what is written or why nothing is."""
    refused_in_a_row: list[SampleError] = []
    for batch in _batches(_readable(job, unit, skipped), advance):
        for document, encoded in zip(batch, job.encode(batch), strict=True):
            is_excluded = document.sample is None and not document.text  # by the split
            is_empty = isinstance(encoded, Encoded) and not has_tokens(encoded)
            if job.keeps_all and is_empty and not is_excluded:
                encoded = SampleError(f"Sample {document.origin}: no tokens.")
            if isinstance(encoded, SampleError):
                _count(skipped["refused"], encoded)
                _count_kind(skipped["refused"]["kinds"], encoded, document.origin)
                logger.debug("refused: %s", encoded)
                refused_in_a_row.append(encoded)
                if len(refused_in_a_row) == MAX_REFUSED_IN_A_ROW:
                    advice = "Use the TaskEncoder for such samples (--task or --encoder)."
                    raise ConfigError(
                        f"{unit.description['path']}: {MAX_REFUSED_IN_A_ROW} documents in a row "
                        f"cannot be trained on, the first: {one_line(refused_in_a_row[0])}. "
                        f"{advice if job.keeps_all else ''}".rstrip()
                    ) from encoded
                if not job.keeps_all:
                    continue
            else:
                refused_in_a_row.clear()
            split = document.split or split_of(document.text, job.val_fraction, job.seed)
            yield document, split, encoded
