# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""One ``.bin``/``.idx`` pair: its header, and its arrays, mapped on demand.

An ``.idx`` contains, little-endian and without gaps: 9 bytes ``MMIDIDX\\0\\0``, uint64 version 1,
uint8 code of the token type, uint64 S sequences, uint64 D + 1 for D documents, int32 [S] tokens of
each sequence, int64 [S] its first byte in the ``.bin``, int64 [D + 1] first sequence of each
document and S. (megatron-core, ``core/datasets/indexed_dataset.py``; its reader keeps two files
open per pair.)
"""

import os
import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Callable, Collection, Mapping

import numpy as np

from energon_ext.batch.columns import LABEL_WEIGHTS, Column, columns_in
from energon_ext.data_files import reading
from energon_ext.errors import ConfigError
from energon_ext.storage.checked_array import CheckedArray
from energon_ext.storage.file_map import map_file, read_at_random
from energon_ext.storage.object_store import StoredObject, local_copy
from energon_ext.storage.range_reader import RemoteTokens
from energon_ext.tokens.column_files import WEIGHTS_SUFFIX as WEIGHTS_SUFFIX
from energon_ext.tokens.column_files import check_size, open_column, suffix_of
from energon_ext.tokens.meta import META_SUFFIX as META_SUFFIX
from energon_ext.tokens.meta import read_meta

SUFFIXES = (".bin", ".idx")

#: Why one of them is missed.
BOTH_FILES = "a pair needs both files"

#: List of all files and counts, which `energon-ext prepare` writes next to its split folders.
PREPARED = "prepared.json"

#: Field of the meta file that identifies a random order; pairs with the same one are parts of it.
SHUFFLED = "shuffled"

ALL_SUFFIXES = (*SUFFIXES, META_SUFFIX, WEIGHTS_SUFFIX)

#: Sequences checked per chunk, few enough for the cache of a core.
_CHECKED_SEQUENCES = 1 << 16

#: Maps of each kind that a process keeps; Linux allows 65530 per process.
MAX_MAPS = 16384

#: Type of a token, sequences, documents, and bytes that the ``.bin`` must have.
Header = tuple[np.dtype, int, int, int]

#: Numbers in a file, read by slices.
Numbers = np.ndarray | RemoteTokens | CheckedArray

#: Field of the ``.meta.json`` of a cached pair, whose tokens and label weights have checksums.
CHECKSUMS = "checksums"

_HEADER = struct.Struct("<9sQBQQ")
_MAGIC = b"MMIDIDX\x00\x00"
_TOKEN_TYPES = {
    code: np.dtype(name).newbyteorder("<")
    for code, name in {1: "u1", 2: "i1", 3: "i2", 4: "i4", 5: "i8", 8: "u2"}.items()
}
_CODES = {dtype: code for code, dtype in _TOKEN_TYPES.items()}


def without_suffix(path: str) -> str:
    """Return the path of a pair, given that path or the path of one of its two files."""
    stem, suffix = os.path.splitext(path)
    return stem if suffix in SUFFIXES else path


@dataclass(frozen=True, eq=False, slots=True)
class Pair:
    """Counts, types and ``.meta.json`` of a pair, known without mapping it.

    Attributes:
        objects: its files by suffix if they are in an object store.
        one_sequence_each: whether each document is one sequence; None if its index was not checked.
    """

    prefix: str
    dtype: np.dtype
    sequences: int
    documents: int
    tokens: int
    meta: Mapping[str, Any] | None
    objects: Mapping[str, StoredObject] | None = None
    one_sequence_each: bool | None = None

    @property
    def columns(self) -> Mapping[str, Column]:
        """Its columns beside tokens."""
        return columns_in(self.meta, f"{self.prefix}{META_SUFFIX}") if self.meta else {}

    def count_of(self, column: Column) -> int:
        """Return the number of items of a column."""
        return self.tokens if column.per == "token" else self.documents


@dataclass(frozen=True, eq=False, slots=True)
class Index:
    """Views of the arrays of an ``.idx``."""

    lengths: np.ndarray
    pointers: np.ndarray  # one more than sequences; the last entry is unused
    first_sequences: np.ndarray


def read_pair(prefix: str, files: Collection[str] = ALL_SUFFIXES) -> Pair:
    """Read and check the header of a pair: a few hundred bytes, whatever the size of the pair.

    Args:
        files: suffixes of the files that it may have; others are not looked for.
    """
    with reading(prefix + ".idx", BOTH_FILES):
        num_bytes = os.stat(prefix + ".bin").st_size
        header = read_header(prefix + ".idx", prefix + ".idx")
    meta = None
    if META_SUFFIX in files:
        meta = read_meta(prefix + META_SUFFIX, prefix + META_SUFFIX)
    pair = pair_of(prefix, header, num_bytes, meta)
    check_columns(pair, files, _size_of)
    return pair


def _size_of(path: str) -> int | None:
    try:
        return os.path.getsize(path)
    except FileNotFoundError:
        return None


def check_columns(pair: Pair, files: Collection[str], size_of: Callable[[str], int | None]) -> None:
    """Raise ConfigError unless the columns of a pair have the files that it describes, no others.

    Args:
        files: suffixes of its files.
        size_of: returns the bytes of a file, None if it does not exist.
    """
    columns = pair.columns
    for name, column in columns.items():
        path = pair.prefix + suffix_of(name)
        check_size(path, size_of(path), column, pair.count_of(column))
    for suffix in sorted({*files}.difference(SUFFIXES, [META_SUFFIX], map(suffix_of, columns))):
        if size_of(pair.prefix + suffix) is not None:
            raise ConfigError(
                f"{pair.prefix}{suffix}: would be ignored, since {pair.prefix}{META_SUFFIX} does "
                f"not mention it; copy that file too, or move this one away."
            )


def pair_of(
    prefix: str,
    header: "Header",
    num_bytes: int,
    meta: Mapping[str, Any] | None,
    objects: Mapping[str, StoredObject] | None = None,
    one_sequence_each: bool | None = None,
) -> Pair:
    """Build a pair; ConfigError if the size of its ``.bin`` does not fit the header."""
    dtype, sequences, documents, expected = header
    if num_bytes != expected:
        raise _of_another_run(prefix, num_bytes, expected)
    counts = sequences, documents, num_bytes // dtype.itemsize
    return Pair(prefix, dtype, *counts, meta, objects, one_sequence_each)


def _of_another_run(prefix: str, num_bytes: int, expected: int) -> ConfigError:
    return ConfigError(
        f"{prefix}.bin has {num_bytes} bytes, its .idx describes {expected}: one of them is "
        f"incomplete or from another run; write the pair again."
    )


@lru_cache(MAX_MAPS)
def open_index(pair: Pair) -> Index:
    """Open the index of a pair; an index in an object store is copied and checked first."""
    if pair.objects is None:
        return map_index(pair, pair.prefix + ".idx")
    index = map_index(pair, local_copy(pair.objects[".idx"]))
    check_index(pair, index)
    return index


def map_index(pair: Pair, path: str) -> Index:
    """Map the index at a path; ConfigError if it is not the one that the pair was built from."""
    with reading(path):
        content = map_file(path, index_bytes(pair))
    if pair.one_sequence_each is not None:  # else it is read as a whole, to check it
        read_at_random(content)
    index = _index(content, pair.sequences)
    described = _described_bytes(pair.dtype, pair.sequences, index)
    header = _header(pair.dtype, pair.sequences, pair.documents + 1)
    is_same = content[: _HEADER.size].tobytes() == header
    if not is_same or described != pair.tokens * pair.dtype.itemsize:
        raise ConfigError(
            f"{pair.prefix}.idx: has changed, and no longer describes {pair.documents} documents "
            f"with {pair.tokens} tokens; copy both files of the pair again, and start again."
        )
    return index


def index_bytes(pair: Pair) -> int:
    """Return the least bytes of the index of a pair; Megatron's multimodal ones have more."""
    return _index_bytes(pair.sequences, pair.documents)


def _index_bytes(sequences: int, documents: int) -> int:
    return _HEADER.size + 12 * sequences + 8 * (documents + 1)


def _index(content: np.ndarray, sequences: int) -> Index:
    begin = _HEADER.size + 4 * sequences
    lengths, numbers = content[_HEADER.size : begin].view("<i4"), content[begin:].view("<i8")
    # One entry more than there are sequences, as the end is looked up like a start.
    return Index(lengths, numbers[: sequences + 1], numbers[sequences:])


def _header(dtype: np.dtype, sequences: int, bounds: int) -> bytes:
    return _HEADER.pack(_MAGIC, 1, _CODES[dtype], sequences, bounds)


def _described_bytes(dtype: np.dtype, sequences: int, index: Index) -> int | None:
    """Return the bytes of the ``.bin`` that an index describes; None if it leaves out sequences."""
    firsts = index.first_sequences
    if firsts[0] != 0 or firsts[-1] != sequences:
        return None
    if not sequences:
        return 0
    return int(index.pointers[sequences - 1]) + int(index.lengths[-1]) * dtype.itemsize


def write_index(path: str, dtype: np.dtype, lengths: np.ndarray) -> None:
    """Write the ``.idx`` of consecutive documents with one sequence each."""
    count = len(lengths)
    with open(path, "wb") as file:
        file.write(_header(dtype, count, count + 1))
        lengths.astype("<i4", copy=False).tofile(file)
        sizes = lengths.astype("<i8") * dtype.itemsize
        (np.cumsum(sizes) - sizes).tofile(file)
        np.arange(count + 1, dtype="<i8").tofile(file)


def check_index(
    pair: Pair, index: Index, advance: Callable[[int], None] = lambda num_bytes: None
) -> bool:
    """Check that all sequences and documents of an index follow one another without gaps.

    So none overlaps another, starts inside a token or extends past the file. For 10^9 documents
    this takes 4 s on one core.

    Args:
        advance: called with the number of bytes checked since the last call.

    Returns:
        Whether each document is one sequence.
    """
    token_bytes = np.int64(pair.dtype.itemsize)
    for begin in range(0, pair.sequences, _CHECKED_SEQUENCES):
        lengths = index.lengths[begin : begin + _CHECKED_SEQUENCES]
        pointers = index.pointers[: pair.sequences][begin : begin + len(lengths) + 1]
        sizes = pointers[1:] - pointers[:-1]  # the last sequence is covered by the header's check
        wrong = lengths < 0
        wrong[: len(sizes)] |= lengths[: len(sizes)] * token_bytes != sizes
        if begin == 0:
            wrong[0] |= pointers[0] != 0
        _refuse(pair, "sequence", begin, wrong)
        advance(12 * len(lengths))
    is_one = pair.sequences == pair.documents
    for begin in range(0, pair.documents, _CHECKED_SEQUENCES):
        firsts = index.first_sequences[begin : begin + _CHECKED_SEQUENCES + 1]
        steps = firsts[1:] - firsts[:-1]
        _refuse(pair, "document", begin, steps < 0)
        is_one = is_one and bool((steps == 1).all())
        advance(8 * len(steps))
    return is_one


def _refuse(pair: Pair, kind: str, begin: int, wrong: np.ndarray) -> None:
    if wrong.any():
        raise _damaged(pair, kind, begin + int(wrong.argmax()))


def _damaged(pair: Pair, kind: str, number: int) -> ConfigError:
    return ConfigError(
        f"{pair.prefix}.idx: damaged, {kind} {number} overlaps another or leaves a gap in "
        f"{pair.prefix}.bin; write the pair again."
    )


@lru_cache(MAX_MAPS)
def open_tokens(pair: Pair) -> Numbers:
    """Open the tokens of a pair."""
    if pair.objects is not None:
        return RemoteTokens(pair.objects[".bin"], pair.dtype)
    # A file that was replaced by a longer one has other documents at the same places.
    num_bytes = pair.tokens * pair.dtype.itemsize
    if (pair.meta or {}).get(CHECKSUMS):
        return CheckedArray(pair.prefix + ".bin", pair.dtype, pair.tokens, is_apart=True)
    return map_file(pair.prefix + ".bin", num_bytes, is_whole=True).view(pair.dtype)


@lru_cache(MAX_MAPS)
def open_pair_column(pair: Pair, name: str) -> Numbers | None:
    """Open a column of a pair, [tokens or documents, *item]; None if the pair has none."""
    column, suffix = pair.columns.get(name), suffix_of(name)
    if column is None:
        return None
    stored = None if pair.objects is None else pair.objects[suffix]
    if name == LABEL_WEIGHTS and stored is None and (pair.meta or {}).get(CHECKSUMS):
        return CheckedArray(pair.prefix + suffix, column.dtype, pair.tokens, is_apart=True)
    return open_column(pair.prefix + suffix, column, pair.count_of(column), stored)


def read_header(name: str, path: str) -> Header:
    """Read the header of the ``.idx`` at a path; messages use the name."""
    try:
        return _read_header(path)
    except (ValueError, struct.error) as error:
        raise ConfigError(
            f"{name}: not a Megatron index ({error}); write the pair again."
        ) from error


def _read_header(path: str) -> Header:
    content = map_file(path, os.stat(path).st_size)
    read_at_random(content)
    header = content[: _HEADER.size].tobytes()
    magic, version, code, sequences, bounds = _HEADER.unpack(header)
    if magic != _MAGIC or version != 1:
        raise ValueError(f"begins with {magic!r}, version {version}")
    if code not in _TOKEN_TYPES:
        raise ValueError(f"type {code} is not an integer type")
    if bounds < 1:
        raise ValueError("it has 0 bounds of documents, which are one more than documents")
    needed = _index_bytes(sequences, bounds - 1)
    # Megatron's multimodal indices end with one byte per sequence.
    if len(content) not in (needed, needed + sequences):
        raise ValueError(
            f"{len(content)} bytes, but {sequences} sequences and {bounds - 1} documents take "
            f"{needed}"
        )
    dtype = _TOKEN_TYPES[code]
    num_bytes = _described_bytes(dtype, sequences, _index(content[:needed], sequences))
    if num_bytes is None:
        raise ValueError("its documents do not cover all its sequences")
    return dtype, sequences, bounds - 1, num_bytes
