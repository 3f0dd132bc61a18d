# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Writes documents as Megatron's token files, one pair for each split.

All of it happens in a hidden folder beside the output, which takes the output's name at the very
end: an interrupted run leaves nothing behind.
"""

import hashlib
import json
import os
import shutil
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from energon_ext.cli.documents import Corpus, Document, Unreadable
from energon_ext.cli.encoding import Encoding
from energon_ext.documents.origins import ORIGINS_SUFFIX, line_of
from energon_ext.documents.token_index import META_SUFFIX, WEIGHTS_SUFFIX
from energon_ext.documents.token_paths import SPLITS, SUFFIXES
from energon_ext.errors import ConfigError

#: Documents of so many characters are tokenized together; the tokenizers library spreads them over
#: all cores.
BATCH_CHARACTERS = 2**20


@dataclass(slots=True)
class Written:
    """Documents, characters and tokens of each split, and how many documents were too short."""

    splits: dict[str, Counter[str]]
    too_short: int = 0


def write_token_files(
    corpus: Corpus,
    output: Path,
    encoding: Encoding,
    *,
    val_fraction: float = 0.05,
    seed: int = 0,
    min_chars: int = 1,
    force: bool = False,
    unreadable: Unreadable | None = None,
) -> Written:
    """Write a corpus as token files; the same input gives the same files, byte by byte.

    Documents that are in no split yet go to ``val`` by a hash of their text, of which ``seed``
    selects another, so equal texts never stand in both splits. White space at the ends does not
    count for ``min_chars``.
    """
    _check_replaceable(output, force)
    output = output.resolve()
    output.parent.mkdir(parents=True, exist_ok=True)
    staging = output.parent / f".{output.name}.partial-{os.getpid()}"
    staging.mkdir()
    try:
        with ExitStack() as stack:
            writers = {
                split: stack.enter_context(closing(_SplitWriter(staging / split, encoding)))
                for split in SPLITS
            }
            written = Written({split: writer.counts for split, writer in writers.items()})
            kept = _long_enough(corpus, min_chars, written, unreadable or Unreadable())
            for batch in _batches(kept):
                for document, tokens, weights in encoding.encode(batch):
                    split = document.split or split_of(document, val_fraction, seed)
                    writers[split].write(document, tokens, weights)
        _check_written(written, encoding, val_fraction, seed, min_chars)
        _replace(output, staging)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return written


def split_of(document: Document, val_fraction: float, seed: int) -> str:
    """The split of a document, by a keyed hash of its text.

    Example:
        >>> documents = [Document(str(number), "") for number in range(1000)]
        >>> [split_of(document, val_fraction=0.25, seed=0) for document in documents].count("val")
        243
    """
    text = document.text.encode()
    digest = hashlib.blake2b(text, digest_size=8, key=seed.to_bytes(8, "little")).digest()
    return "val" if int.from_bytes(digest, "little") < val_fraction * 2**64 else "train"


def token_file_builder(prefix: str | Path, vocab_size: int) -> Any:
    """Megatron-core's builder of a pair: ``add_document``, then ``finalize`` with the ``.idx``."""
    try:
        from megatron.core.datasets import indexed_dataset
    except ImportError as error:
        raise ConfigError(
            "Token files are written with megatron-core: pip install 'energon_ext[megatron]'."
        ) from error
    dtype = indexed_dataset.DType.optimal_dtype(vocab_size)
    return indexed_dataset.IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)


class _SplitWriter:
    """Hands documents to megatron-core's builder; without a document there are no files."""

    def __init__(self, prefix: Path, encoding: Encoding):
        self.counts: Counter[str] = Counter()
        self._prefix = prefix
        self._encoding = encoding
        self._builder: Any = None
        self._origins: Any = None

    def write(self, document: Document, tokens: np.ndarray, weights: np.ndarray | None) -> None:
        if self._builder is None:
            vocab_size = self._encoding.tokenizer.vocab_size
            self._builder = token_file_builder(self._prefix, vocab_size)
            path = self._prefix.with_suffix(ORIGINS_SUFFIX)
            self._origins = path.open("w", encoding="utf-8", errors="replace")
        with warnings.catch_warnings():  # megatron-core 0.16 calls NumPy 2 the old way
            warnings.simplefilter("ignore", DeprecationWarning)
            self._builder.add_document(torch.from_numpy(tokens), [len(tokens)])
        if weights is not None:
            with self._prefix.with_suffix(WEIGHTS_SUFFIX).open("ab") as file:
                file.write(weights.astype(np.uint8).tobytes())
        self._origins.write(line_of(document.origin))
        self.counts.update(documents=1, characters=len(document.text), tokens=len(tokens))

    def close(self) -> None:
        if self._builder is None:
            return
        self._origins.close()
        self._builder.finalize(str(self._prefix.with_suffix(".idx")))  # closes the files as well
        meta = json.dumps(self._encoding.description(), indent=2)
        self._prefix.with_suffix(META_SUFFIX).write_text(meta + "\n")


def _long_enough(
    corpus: Corpus, min_chars: int, written: Written, unreadable: Unreadable
) -> Iterator[Document]:
    """The documents that are kept, behind a progress bar."""
    by_documents = corpus.total_bytes is None
    total = corpus.total_documents if by_documents else corpus.total_bytes
    unit = "doc" if by_documents else "B"
    with tqdm(total=total, unit=unit, unit_scale=not by_documents, desc="reading") as bar:
        for document in corpus.documents:
            with unreadable:
                _check_characters(document)
                if len(document.text.strip()) < min_chars:
                    written.too_short += 1
                else:
                    yield document
            bar.update(1 if by_documents else document.num_bytes)


def _check_characters(document: Document) -> None:
    try:
        document.text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{document.origin}: the text holds half a character (a lone surrogate, "
            f"{document.text[error.start]!r}); mend or remove it."
        ) from error


def _batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += len(document.text)
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _check_written(
    written: Written, encoding: Encoding, val_fraction: float, seed: int, min_chars: int
) -> None:
    documents = sum(counts["documents"] for counts in written.splits.values())
    if not documents:
        refused = f", and {encoding.refused.count} refused, the first: {encoding.refused.first}"
        raise ConfigError(
            f"The input has no document of at least {min_chars} characters "
            f"({written.too_short} shorter ones{refused if encoding.refused.count else ''})."
        )
    for split in SPLITS if val_fraction > 0 else SPLITS[:1]:
        if not written.splits[split]["documents"]:
            raise ConfigError(
                f"None of the {documents} documents fell into {split} with --val {val_fraction} "
                f"and --seed {seed}. Change --val (0: no val split) or --seed."
            )


def _check_replaceable(output: Path, force: bool) -> None:
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return
    known = (*SUFFIXES, META_SUFFIX, ORIGINS_SUFFIX)  # weights end with .bin as well
    if not output.is_dir() or not all(path.name.endswith(known) for path in output.iterdir()):
        raise ConfigError(
            f"{output}: exists and holds other things than token files; not even --force "
            f"replaces it."
        )
    if not force:
        raise ConfigError(f"{output}: exists. Replace it with --force.")


def _replace(output: Path, staging: Path) -> None:
    if not output.exists():
        staging.rename(output)
        return
    old = output.parent / f".{output.name}.old-{os.getpid()}"
    output.rename(old)
    staging.rename(output)
    shutil.rmtree(old)
