# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Writes documents as an Energon webdataset of ``TextSample``, or tokenized as Megatron's files.

Documents go one by one into tar shards, train and val apart, and Energon indexes the shards. Token
files are one pair a split. All of it happens in a hidden folder beside the output, which takes the
output's name at the very end: an interrupted run leaves nothing behind.
"""

import contextlib
import hashlib
import io
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml
from megatron.energon.flavors.webdataset.config import MAIN_FOLDER_NAME
from megatron.energon.flavors.webdataset.prepare import WebdatasetPreparator
from tqdm import tqdm
from webdataset import TarWriter

from energon_ext.cli.counts import DatasetCounts, SplitCounts
from energon_ext.cli.documents import Corpus, Document
from energon_ext.cli.token_writer import Encoding, TokenSplitWriter
from energon_ext.documents.label_weights import WEIGHTS_SUFFIX
from energon_ext.documents.token_index import META_SUFFIX
from energon_ext.documents.token_paths import SPLITS
from energon_ext.documents.token_paths import SUFFIXES as TOKEN_FILE_SUFFIXES
from energon_ext.errors import ConfigError

DATASET_YAML = {
    "sample_type": {"__module__": "megatron.energon", "__class__": "TextSample"},
    "field_map": {"text": "txt"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteOptions:
    """How a corpus becomes a dataset.

    Attributes:
        val_fraction: share of the documents for the split ``val``, in [0, 1), of those that are in
            no split yet. Which documents is decided by a hash of the text, so equal texts never
            stand in both splits.
        seed: selects another hash.
        shard_documents: documents per tar file.
        min_chars: shorter documents are left out; white space at the ends does not count.
        workers: processes that index the shards.
        force: replace a dataset that is already there.
        encoding: write token files instead of text.
    """

    val_fraction: float = 0.05
    seed: int = 0
    shard_documents: int = 10_000
    min_chars: int = 1
    workers: int = 1
    force: bool = False
    encoding: Encoding | None = None


def write_text_dataset(corpus: Corpus, output: Path, options: WriteOptions) -> DatasetCounts:
    """Write a corpus as a dataset; the same input gives the same files, byte by byte.

    Args:
        corpus: read once, in constant memory.
        output: folder to create.
        options: split, shards and what to leave out.

    Returns:
        Counts per split.

    Raises:
        ConfigError: the output exists, the input is empty or damaged, or a split got no document.
    """
    _check_replaceable(output, options.force)
    output = output.resolve()
    output.parent.mkdir(parents=True, exist_ok=True)
    staging = output.parent / f".{output.name}.partial-{os.getpid()}"
    staging.mkdir()
    try:
        counts = _write_splits(corpus, staging, options)
        _check_splits(counts, options)
        if options.encoding is None:
            _index(staging, counts, options.workers)
        _replace(output, staging)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return counts


def split_of(text: bytes, val_fraction: float, seed: int) -> str:
    """The split a document belongs to, by a keyed hash of its text.

    Example:
        >>> splits = [split_of(b"%d" % n, val_fraction=0.25, seed=0) for n in range(1000)]
        >>> splits.count("val")
        243
    """
    digest = hashlib.blake2b(text, digest_size=8, key=seed.to_bytes(8, "little")).digest()
    return "val" if int.from_bytes(digest, "little") < val_fraction * 2**64 else "train"


class _SplitWriter:
    """Writes documents of one split; a shard is opened when its first document comes."""

    def __init__(self, folder: Path, split: str, shard_documents: int):
        self.counts = SplitCounts()
        self._folder = folder
        self._split = split
        self._shard_documents = shard_documents
        self._open_shard = contextlib.ExitStack()

    def write(self, key: str, document: Document) -> None:
        if self.counts.documents % self._shard_documents == 0:
            self._next_shard()
        self._tar.write({"__key__": key, "txt": document.text.encode("utf-8")})
        self.counts.documents += 1
        self.counts.characters += len(document.text)

    def _next_shard(self) -> None:
        self._open_shard.close()
        path = self._folder / f"{self._split}-{self.counts.shards:06d}.tar"
        file = self._open_shard.enter_context(path.open("wb"))
        # A fixed time stamp: equal input, equal bytes.
        self._tar = self._open_shard.enter_context(TarWriter(file, encoder=False, mtime=0))
        self.counts.shards += 1

    def __enter__(self) -> "_SplitWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self._open_shard.close()


def _write_splits(corpus: Corpus, folder: Path, options: WriteOptions) -> DatasetCounts:
    writers = {split: _split_writer(folder, split, options) for split in SPLITS}
    result = DatasetCounts({split: writer.counts for split, writer in writers.items()})
    if options.encoding is not None:
        result.refused = options.encoding.refused
    with contextlib.ExitStack() as stack:
        for writer in writers.values():
            stack.enter_context(writer)
        for number, document in enumerate(_with_progress(corpus)):
            if len(document.text.strip()) < options.min_chars:
                result.skipped += 1
            else:
                writers[_split_of(document, options)].write(f"{number:010d}", document)
    return result


def _split_of(document: Document, options: WriteOptions) -> str:
    encoded = _encode(document)
    return document.split or split_of(encoded, options.val_fraction, options.seed)


def _split_writer(
    folder: Path, split: str, options: WriteOptions
) -> TokenSplitWriter | _SplitWriter:
    if options.encoding is not None:
        return TokenSplitWriter(folder, split, options.encoding)
    return _SplitWriter(folder, split, options.shard_documents)


def _with_progress(corpus: Corpus) -> Iterator[Document]:
    by_documents = corpus.total_bytes is None
    total = corpus.total_documents if by_documents else corpus.total_bytes
    unit = "doc" if by_documents else "B"
    with tqdm(total=total, unit=unit, unit_scale=not by_documents, desc="reading") as bar:
        for number, document in enumerate(corpus.documents, start=1):
            yield document
            if not by_documents:
                bar.set_postfix_str(f"{number:,} documents", refresh=False)
            bar.update(1 if by_documents else document.num_bytes)


def _encode(document: Document) -> bytes:
    try:
        return document.text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{document.origin}: the text holds half a character (a lone surrogate, "
            f"{document.text[error.start]!r}); mend or remove it."
        ) from error


def _check_splits(counts: DatasetCounts, options: WriteOptions) -> None:
    documents = sum(split.documents for split in counts.splits.values())
    if documents == 0:
        refused = counts.refused
        and_refused = f", and {refused.count} refused, the first: {refused.first}"
        raise ConfigError(
            f"The input has no document of at least {options.min_chars} characters "
            f"({counts.skipped} shorter ones{and_refused if refused.count else ''})."
        )
    wanted = SPLITS if options.val_fraction > 0 else SPLITS[:1]
    for split in wanted:
        if counts.splits[split].documents == 0:
            raise ConfigError(
                f"None of the {documents} documents fell into {split} with --val "
                f"{options.val_fraction} and --seed {options.seed}. Change --val "
                "(0: no val split) or --seed."
            )


def _index(folder: Path, counts: DatasetCounts, workers: int) -> None:
    with contextlib.redirect_stdout(io.StringIO()):  # Energon prints what it writes.
        WebdatasetPreparator.prepare_dataset(
            folder,
            sorted(path.name for path in folder.glob("*.tar")),
            split_parts_patterns=[
                (split, f"{split}-.*") for split in SPLITS if counts.splits[split].shards
            ],
            progress_fn=_shard_progress,
            workers=workers,
        )
    (folder / MAIN_FOLDER_NAME / "dataset.yaml").write_text(
        yaml.safe_dump(DATASET_YAML, sort_keys=False), encoding="utf-8"
    )


def _shard_progress(shards: Iterator[int], total: int) -> Iterator[int]:
    with tqdm(total=total, unit="shard", desc="indexing") as bar:
        for shard in shards:
            bar.update()
            yield shard


def _check_replaceable(output: Path, force: bool) -> None:
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return
    if not output.is_dir() or not all(_is_dataset_file(path) for path in output.iterdir()):
        raise ConfigError(
            f"{output}: exists and holds other things than an Energon dataset; "
            "not even --force replaces it."
        )
    if not force:
        raise ConfigError(f"{output}: exists. Replace it with --force.")


def _is_dataset_file(path: Path) -> bool:
    suffixes = (".tar", ".tar.idx", *TOKEN_FILE_SUFFIXES, META_SUFFIX, WEIGHTS_SUFFIX)
    return path.name == MAIN_FOLDER_NAME or path.name.endswith(suffixes)


def _replace(output: Path, staging: Path) -> None:
    if not output.exists():
        staging.rename(output)
        return
    old = output.parent / f".{output.name}.old-{os.getpid()}"
    output.rename(old)
    staging.rename(output)
    shutil.rmtree(old)
