# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""One ``.bin``/``.idx`` pair: its header, and its arrays, mapped on demand.

An ``.idx`` contains, little-endian and without gaps: 9 bytes ``MMIDIDX\\0\\0``, uint64 version 1,
uint8 code of the token type, uint64 S sequences, uint64 D + 1 for D documents, int32 [S] tokens of
each sequence, int64 [S] its first byte in the ``.bin``, int64 [D + 1] first sequence of each
document and S. (megatron-core, ``core/datasets/indexed_dataset.py``; its reader keeps two files
open per pair.)
"""

import json
import os
import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Mapping

import numpy as np

from energon_ext.data_files import read_data
from energon_ext.errors import ConfigError
from energon_ext.storage.file_map import map_file
from energon_ext.storage.object_store import StoredObject, local_copy
from energon_ext.storage.range_reader import RemoteTokens

SUFFIXES = (".bin", ".idx")

#: List of all files and counts, which `energon-ext prepare` writes next to its split folders.
PREPARED = "prepared.json"

#: Tokenizer and type of the weights of a pair that `energon-ext prepare` wrote.
META_SUFFIX = ".meta.json"
MAX_META_BYTES = 2**20

#: Field of the meta file that identifies a random order; pairs with the same one are parts of it.
SHUFFLED = "shuffled"

#: One number per token: uint8 if all are 0 or 1, as for fine-tuning on answers, else float32.
#: The meta file contains the type, as ``{"label_weights": {"dtype": "uint8"}}``.
WEIGHTS_SUFFIX = ".weights.bin"
_WEIGHTS_DTYPES = ("uint8", "float32")

#: Sequences checked per chunk, few enough for the cache of a core.
_CHECKED_SEQUENCES = 1 << 16

#: Maps of each kind that a process keeps; Linux allows 65530 per process.
MAX_MAPS = 16384

#: Type of a token, sequences, documents, and bytes that the ``.bin`` must have.
Header = tuple[np.dtype, int, int, int]

#: Numbers in a file, read by slices.
Numbers = np.ndarray | RemoteTokens

_HEADER = struct.Struct("<9sQBQQ")
_MAGIC = b"MMIDIDX\x00\x00"
_TOKEN_TYPES = {
    code: np.dtype(name).newbyteorder("<")
    for code, name in {1: "u1", 2: "i1", 3: "i2", 4: "i4", 5: "i8", 8: "u2"}.items()
}


def without_suffix(path: str) -> str:
    """Return the path of a pair, given that path or the path of one of its two files."""
    stem, suffix = os.path.splitext(path)
    return stem if suffix in SUFFIXES else path


@dataclass(frozen=True, eq=False, slots=True)
class Pair:
    """Counts, types and ``.meta.json`` of a pair, known without mapping it.

    ``objects`` are its files by suffix if they are in an object store.
    """

    prefix: str
    dtype: np.dtype
    sequences: int
    documents: int
    tokens: int
    weights_dtype: np.dtype | None
    meta: Mapping[str, Any] | None
    objects: Mapping[str, StoredObject] | None = None


@dataclass(frozen=True, eq=False, slots=True)
class Index:
    """Views of the arrays of an ``.idx``."""

    lengths: np.ndarray
    pointers: np.ndarray  # one more than sequences; the last entry is unused
    first_sequences: np.ndarray


def read_pair(prefix: str) -> Pair:
    """Read and check the header of a pair: a few hundred bytes, whatever the size of the pair."""
    try:
        num_bytes = os.stat(prefix + ".bin").st_size
        header = read_header(prefix + ".idx", prefix + ".idx")
    except FileNotFoundError as error:
        raise ConfigError(f"{error.filename}: does not exist; a pair needs both files.") from error
    except OSError as error:
        raise ConfigError(f"{error.filename}: cannot be read ({error.strerror}).") from error
    path = prefix + WEIGHTS_SUFFIX
    weights_bytes = os.path.getsize(path) if os.path.isfile(path) else None
    meta = read_meta(prefix + META_SUFFIX, prefix + META_SUFFIX)
    return pair_of(prefix, header, num_bytes, weights_bytes, meta)


def pair_of(
    prefix: str,
    header: "Header",
    num_bytes: int,
    weights_bytes: int | None,
    meta: Mapping[str, Any] | None,
    objects: Mapping[str, StoredObject] | None = None,
) -> Pair:
    """Build a pair; ConfigError if the size of its ``.bin`` or weights does not fit the header."""
    dtype, sequences, documents, expected = header
    if num_bytes != expected:
        raise _of_another_run(prefix, num_bytes, expected)
    tokens = num_bytes // dtype.itemsize
    weights = _weights_dtype(prefix, meta, tokens, weights_bytes)
    return Pair(prefix, dtype, sequences, documents, tokens, weights, meta, objects)


def _of_another_run(prefix: str, num_bytes: int, expected: int) -> ConfigError:
    return ConfigError(
        f"{prefix}.bin has {num_bytes} bytes, its .idx describes {expected}: one of them is "
        f"incomplete or from another run; write the pair again."
    )


@lru_cache(MAX_MAPS)
def open_index(pair: Pair) -> Index:
    """Open the index of a pair; an index in an object store is copied and checked first."""
    path = where = pair.prefix + ".idx"
    if pair.objects is not None:
        where = local_copy(pair.objects[".idx"])
        found, num_bytes = read_header(path, where), pair.tokens * pair.dtype.itemsize
        if found != (pair.dtype, pair.sequences, pair.documents, num_bytes):
            raise _of_another_run(pair.prefix, num_bytes, found[-1])
    content = map_file(where, _index_bytes(pair.sequences, pair.documents))
    index = _index(content, pair.sequences)
    if pair.objects is not None:
        _check(pair, index)
    return index


def check_index(pair: Pair) -> None:
    """Check that all sequences and documents of an index follow one another without gaps.

    So none overlaps another, starts inside a token or extends past the file. For 10^9 documents
    this takes 4 s on one core; a run reads these 20 GB anyway. Caching the result would need a file
    next to the data, which is often read-only, and trust in its time stamps.
    """
    _check(pair, open_index(pair))


def _index_bytes(sequences: int, documents: int) -> int:
    return _HEADER.size + 12 * sequences + 8 * (documents + 1)


def _index(content: np.ndarray, sequences: int) -> Index:
    begin = _HEADER.size + 4 * sequences
    lengths, numbers = content[_HEADER.size : begin].view("<i4"), content[begin:].view("<i8")
    # One entry more than there are sequences, as the end is looked up like a start.
    return Index(lengths, numbers[: sequences + 1], numbers[sequences:])


def write_index(path: str, dtype: np.dtype, lengths: np.ndarray) -> None:
    """Write the ``.idx`` of consecutive documents with one sequence each."""
    count = len(lengths)
    code = next(code for code, known in _TOKEN_TYPES.items() if known == dtype)
    with open(path, "wb") as file:
        file.write(_HEADER.pack(_MAGIC, 1, code, count, count + 1))
        lengths.astype("<i4", copy=False).tofile(file)
        sizes = lengths.astype("<i8") * dtype.itemsize
        (np.cumsum(sizes) - sizes).tofile(file)
        np.arange(count + 1, dtype="<i8").tofile(file)


def _check(pair: Pair, index: Index) -> None:
    token_bytes = np.int64(pair.dtype.itemsize)
    for begin in range(0, pair.sequences, _CHECKED_SEQUENCES):
        lengths = index.lengths[begin : begin + _CHECKED_SEQUENCES]
        pointers = index.pointers[: pair.sequences][begin : begin + len(lengths) + 1]
        sizes = np.diff(pointers)  # the last sequence is covered by the header's check
        wrong = lengths < 0
        wrong[: len(sizes)] |= lengths[: len(sizes)] * token_bytes != sizes
        if begin == 0:
            wrong[0] |= pointers[0] != 0
        _refuse(pair, "sequence", begin, wrong)
    for begin in range(0, pair.documents, _CHECKED_SEQUENCES):
        firsts = index.first_sequences[begin : begin + _CHECKED_SEQUENCES + 1]
        _refuse(pair, "document", begin, firsts[1:] < firsts[:-1])


def _refuse(pair: Pair, kind: str, begin: int, wrong: np.ndarray) -> None:
    if wrong.any():
        raise ConfigError(
            f"{pair.prefix}.idx: damaged, {kind} {begin + int(wrong.argmax())} overlaps another or "
            f"leaves a gap in {pair.prefix}.bin; write the pair again."
        )


@lru_cache(MAX_MAPS)
def open_tokens(pair: Pair) -> Numbers:
    """Open the tokens of a pair."""
    return _open(pair, ".bin", pair.dtype)


@lru_cache(MAX_MAPS)
def open_label_weights(pair: Pair) -> Numbers | None:
    """Open the label weights of a pair, in the type of the file; None if it has none."""
    dtype = pair.weights_dtype
    return None if dtype is None else _open(pair, WEIGHTS_SUFFIX, dtype)


def _open(pair: Pair, suffix: str, dtype: np.dtype) -> Numbers:
    if pair.objects is not None:
        return RemoteTokens(pair.objects[suffix], dtype)
    return map_file(pair.prefix + suffix, pair.tokens * dtype.itemsize).view(dtype)


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
    index = _index(content[:needed], sequences)
    if index.first_sequences[0] != 0 or index.first_sequences[-1] != sequences:
        raise ValueError("its documents do not cover all its sequences")
    dtype = _TOKEN_TYPES[code]
    num_bytes = 0
    if sequences > 0:
        last_bytes = int(index.lengths[-1]) * dtype.itemsize
        num_bytes = int(index.pointers[sequences - 1]) + last_bytes
    return dtype, sequences, bounds - 1, num_bytes


def read_meta(name: str, path: str) -> Mapping[str, Any] | None:
    """Read the ``.meta.json`` at a path, None if there is none; messages use the name."""
    try:
        content = read_data(path, MAX_META_BYTES)
    except FileNotFoundError:
        return None
    try:
        return _parse_meta(content)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{name}: not written by `energon-ext prepare` ({error}).") from error


def _weights_dtype(
    prefix: str, meta: Mapping[str, Any] | None, num_tokens: int, found_bytes: int | None
) -> np.dtype | None:
    """Return the type of a pair's label weights, one per token; None if it has none."""
    path = prefix + WEIGHTS_SUFFIX
    described = (meta or {}).get("label_weights")
    if described is None:
        if found_bytes is None:
            return None
        raise ConfigError(
            f"{path}: would be ignored, since {prefix}.meta.json does not mention it; copy that "
            f"file too, or remove the weights."
        )
    name = described.get("dtype") if isinstance(described, Mapping) else described
    if name not in _WEIGHTS_DTYPES:
        raise ConfigError(
            f"{prefix}.meta.json: the type of label_weights must be "
            f"{' or '.join(_WEIGHTS_DTYPES)}, found {name!r}."
        )
    dtype = np.dtype(name)
    if found_bytes != num_tokens * dtype.itemsize:
        found = "does not exist" if found_bytes is None else f"has {found_bytes} bytes"
        raise ConfigError(
            f"{path}: {found}, {num_tokens} tokens need {num_tokens * dtype.itemsize} bytes; copy "
            f"it again."
        )
    return dtype


@lru_cache(64)
def _parse_meta(content: bytes) -> Mapping[str, Any]:
    """Parse a meta file; cached by content, as thousands of pairs may share one tokenizer."""
    meta = json.loads(content)
    if not isinstance(meta, dict) or "tokenizer" not in meta:
        raise ValueError("it has no `tokenizer`")
    return meta
