# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Documents of ``.npy`` shards of token ids, as OLMo-core reads them.

Despite their name such shards are bare arrays: ids of 1, 2, 4 or 8 bytes, little-endian, without a
header; those that ``numpy.save`` wrote have one and are read as well. Where documents end is in the
``NAME.csv.gz`` that dolma writes next to ``NAME.npy`` (lines that begin with ``start,end,``), or
each ends with the ``end_token`` of a ``shards.json`` in the folder. (OLMo-core,
``data/utils.py``.)

The mask of ``token_ids_part_0000.npy`` is ``labels_mask_part_0000.npy``: a byte per token, 1 where
it is trained.
"""

import functools
import gzip
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from energon_ext.data_files import open_data, parse_json, read_data
from energon_ext.errors import ConfigError
from energon_ext.storage.file_map import map_file
from energon_ext.storage.object_store import StoredObject
from energon_ext.tokens.index import MAX_MAPS
from energon_ext.tokens.scanned import ScannedFiles, local_files

#: Describes all shards in its folder: ``{"dtype": "uint32", "end_token": 100257}``.
DESCRIPTION = "shards.json"
_MAX_DESCRIPTION_BYTES = 4096

_TYPES = {size: np.dtype(f"<u{size}") for size in (1, 2, 4, 8)}
_NAMES = {dtype.name: dtype for dtype in _TYPES.values()}

_TOKENS, _MASKS = "token_ids_part_", ("labels_mask_part_", "labels_mask_")

#: The header of an array of integers, as all writers of the format put it, and its fields.
_MAX_HEADER = 1 << 16
_FIELDS = (
    re.compile(rb"'descr': '([<>|=]?[iu][1248])'"),
    re.compile(rb"'shape': \((\d{1,18})L?,\)"),
)

#: Lines of a ``.csv.gz`` or tokens that are read at once, and the longest line.
_CHUNK_LINES, _CHUNK_TOKENS, _MAX_LINE = 1 << 16, 1 << 22, 1 << 16


class NpyTokens(ScannedFiles):
    """Documents of ``.npy`` shards; see the module.

    Args:
        files: in the order of their documents.
        how: size and time of the files next to each shard, which say where documents end.

    Raises:
        ConfigError: on first use, if a shard is truncated, is not an array of integers, or nothing
            says where its documents end.
    """

    @functools.cached_property
    def unweighted(self) -> str | None:
        return next((stored.url for stored in self.files if mask_of(stored.url) is None), None)

    def scan(self, file: int) -> Iterator[np.ndarray]:
        stored, total = self.files[file], 0
        table = _table_of(stored.url)
        if os.path.exists(table):
            for ends in _ends_in(table):
                yield np.diff(ends, prepend=total)
                total = int(ends[-1])
            shard = _open_shard(stored, total)
        else:
            end_token = _described(stored.url, "end_token")
            shard = _open_shard(stored, None)
            total = len(shard)
            yield from _split(stored.url, shard, end_token)
        if len(shard) != total:
            raise ConfigError(
                f"{stored.url}: has {len(shard)} tokens, but {total} in {table}; one of the two is "
                f"incomplete or from another run."
            )
        mask = _open_mask(stored, total)
        if mask is not None and mask.max(initial=0) > 1:
            raise ConfigError(f"{mask_of(stored.url)}: has a byte other than 0 and 1.")

    def read_pieces(
        self, numbers: Sequence[int], starts: Sequence[int], stops: Sequence[int]
    ) -> tuple[list[Any], list[Any]]:
        files = self.files_of(numbers)
        firsts = self.ends[self.first_documents[files]]
        totals = self.ends[self.first_documents[files + 1]] - firsts
        begins = self.ends[np.asarray(numbers, np.int64)] - firsts
        tokens, weights = [], []
        where = files.tolist(), totals.tolist(), begins.tolist(), starts, stops
        for file, total, begin, start, stop in zip(*where):
            part = slice(begin + start, begin + stop)
            mask = _open_mask(self.files[file], total)
            tokens.append(_open_shard(self.files[file], total)[part])
            weights.append(None if mask is None else mask[part].astype(np.float32))
        return tokens, weights


def open_npy(path: str) -> NpyTokens:
    """Open the shards that a path names: one, a folder or a pattern."""
    found = local_files(path, ".npy")
    files = [each for each in found if not os.path.basename(each.url).startswith(_MASKS)]
    if not files:
        raise ConfigError(f"{path}: names masks only; name the {_TOKENS}*.npy next to them.")
    used = {each.url for each in files} | {mask_of(each.url) for each in files}
    for each in found:
        if each.url not in used:
            raise ConfigError(
                f"{each.url}: is not the mask of a shard that {path} names; shards with masks are "
                f"named {_TOKENS}*.npy."
            )
    return NpyTokens(files, [_beside(stored.url) for stored in files])


# One shard --------------------------------------------------------------------------------------


def _table_of(path: str) -> str:
    return path.removesuffix(".npy") + ".csv.gz"


def mask_of(path: str) -> str | None:
    """Return the file with the mask of a shard; None if there is none."""
    folder, name = os.path.split(path)
    if not name.startswith(_TOKENS):
        return None
    masks = [os.path.join(folder, start + name.removeprefix(_TOKENS)) for start in _MASKS]
    return next(filter(os.path.exists, masks), None)


def _beside(path: str) -> list[list[int] | None]:
    """Return size and time of the files that describe a shard; None for a missing one."""
    table, mask = _table_of(path), mask_of(path)
    found = []
    for each in (table, mask, os.path.join(os.path.dirname(path), DESCRIPTION)):
        try:
            status = None if each is None else os.stat(each)
        except FileNotFoundError:
            status = None
        found.append(None if status is None else [status.st_size, status.st_mtime_ns])
    return found


def _described(path: str, field: str) -> Any:
    """Return a field of the description of a shard's folder; ConfigError if nothing has it."""
    file = os.path.join(os.path.dirname(path), DESCRIPTION)
    found = _description(file)
    if found is None:
        raise ConfigError(
            f"{path}: nothing says where its documents end. Put the {_table_of(path)} of dolma "
            f'next to it, or a {DESCRIPTION} such as {{"dtype": "uint32", "end_token": 100257}}.'
        )
    value = found.get(field)
    if field == "end_token" and not (type(value) is int and value >= 0):
        raise ConfigError(f"{file}: end_token: {value!r:.80} found, a token id is needed.")
    if field == "dtype" and value not in _NAMES:
        raise ConfigError(f"{file}: dtype: {value!r:.80} found, {', '.join(_NAMES)} are known.")
    return value


def _description(file: str) -> dict[str, Any] | None:
    try:
        found = parse_json(read_data(file, _MAX_DESCRIPTION_BYTES))
    except FileNotFoundError:
        return None
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{file}: not JSON ({error}).") from error
    if not isinstance(found, dict) or set(found) - {"dtype", "end_token"}:
        raise ConfigError(f"{file}: an object with `dtype` and `end_token` is needed.")
    return found


@functools.lru_cache(MAX_MAPS)
def _open_shard(stored: StoredObject, total: int | None) -> np.ndarray:
    """Map the tokens of a shard, given how many it has; None if only its description says that."""
    content = map_file(stored.url, stored.size)
    dtype, begin = _header(stored)
    if dtype is None and total is not None:
        dtype = _TYPES.get(stored.size // total if total else 1)
        if dtype is None or stored.size != total * dtype.itemsize:
            raise ConfigError(
                f"{stored.url}: has {stored.size} bytes for {total} tokens; the shard or its "
                f"{_table_of(stored.url)} is incomplete or from another run."
            )
    elif dtype is None:
        dtype = _NAMES[_described(stored.url, "dtype")]
    if (stored.size - begin) % dtype.itemsize:
        raise ConfigError(
            f"{stored.url}: {stored.size - begin} bytes are no whole number of {dtype.name}; it is "
            f"incomplete, or of another type."
        )
    return content[begin:].view(dtype)


def _header(stored: StoredObject) -> tuple[np.dtype | None, int]:
    """Return the type and the first byte of the tokens; (None, 0) if there is no header."""
    with open_data(stored.url) as file:
        start = file.read(8)
        if start[:6] != np.lib.format.MAGIC_PREFIX:
            return None, 0
        size = file.read(2 if start[6:7] == b"\x01" else 4)
        header = file.read(min(int.from_bytes(size, "little"), _MAX_HEADER))
        begin = file.tell()
    # Not NumPy's parser: it evaluates the text, however long it is.
    dtype_found, shape_found = (field.search(header) for field in _FIELDS)
    if dtype_found is None or shape_found is None:
        raise ConfigError(
            f"{stored.url}: its header is {header.decode('latin1').strip()!r:.200}; that of an "
            f"array with one row of integers is needed."
        )
    dtype = np.dtype(dtype_found[1].decode())
    described = begin + int(shape_found[1]) * dtype.itemsize
    if described != stored.size:
        raise ConfigError(
            f"{stored.url}: has {stored.size} bytes, its header describes {described}; copy it "
            f"again."
        )
    return dtype, begin


@functools.lru_cache(MAX_MAPS)
def _open_mask(stored: StoredObject, total: int) -> np.ndarray | None:
    """Map the mask of a shard, uint8 [total]; None if it has none."""
    path = mask_of(stored.url)
    if path is None:
        return None
    found = os.path.getsize(path)
    if found != total:
        raise ConfigError(f"{path}: has {found} bytes; {total} tokens need one byte each.")
    return map_file(path, total)


# Where documents end ----------------------------------------------------------------------------


def _split(path: str, shard: np.ndarray, end_token: int) -> Iterator[np.ndarray]:
    """Yield the lengths of documents that end with a token; the last one need not.

    ConfigError if none does.
    """
    begin = 0
    for first in range(0, len(shard), _CHUNK_TOKENS):
        part = shard[first : first + _CHUNK_TOKENS]
        ends = np.flatnonzero(part == end_token) + first + 1
        yield np.diff(ends, prepend=begin)
        begin = int(ends[-1]) if len(ends) else begin
    if begin == 0 and len(shard):
        raise ConfigError(
            f"{path}: none of its {len(shard)} tokens is the end_token {end_token} of "
            f"{DESCRIPTION}; check it, and the dtype."
        )
    if begin < len(shard):
        yield np.array([len(shard) - begin])


def _ends_in(table: str) -> Iterator[np.ndarray]:
    """Yield the ends in a ``.csv.gz``, int64, in parts; every document begins where one ends."""
    ends: list[int] = []
    number = end = 0
    try:
        with open_data(table) as packed, gzip.open(packed, "rb") as file:
            while line := file.readline(_MAX_LINE):
                number += 1
                start, stop = map(int, line.split(b",", 2)[:2])
                if start != end or not start < stop < 2**63:
                    raise ValueError(f"{start} to {stop} after a document that ends at {end}")
                ends.append(end := stop)
                if len(ends) == _CHUNK_LINES:
                    yield np.array(ends, np.int64)
                    ends = []
    except (ValueError, OSError, EOFError, zlib.error) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"{table}:{number}: {error!s:.200}; lines that begin with the first token of a "
            f"document and the one after its last are needed, without gaps."
        ) from error
    if ends:
        yield np.array(ends, np.int64)
