# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The documents of a unit, sorted by random keys, from which *buckets* of documents are read.

The key of a document is a hash of the seed, the unit and the document's number in it. Bucket b of
2^k contains the documents whose keys begin with the k bits of b. A bucket of all units together,
sorted by key, is part b of one random order of all documents.

A file contains sorted *runs* of documents, one after another, so that a unit of any size is sorted
with little memory. The documents of a bucket follow one another in each run. A table at the end of
the file says where: it has the first byte of each of up to 4096 equal ranges of keys.
"""

import io
import math
import struct
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from energon_ext.batch.columns import NO_COLUMNS, Column, check_values
from energon_ext.keyed import keyed_bits
from energon_ext.prepare.token_writer import check_ids, token_type, weights_type

SUFFIX = ".documents"

#: Bytes of documents that are sorted at once.
RUN_BYTES = 2**28

#: Most ranges of keys in a table, as a power of two, and about how many documents are in one. For a
#: bucket that is smaller than a range, all of the range is read.
_MAX_RANGE_BITS = 12
_RANGE_DOCUMENTS = 16

#: A document is its key, its sizes (tokens, bytes of the origin, bytes of a label weight), its
#: tokens, its weights, its columns and its origin.
_NUMBER, _SIZES = struct.Struct("<Q"), struct.Struct("<IIB")
_HEADER_BYTES = _NUMBER.size + _SIZES.size
#: The end of a file: runs, and bits of the ranges.
_TAIL = struct.Struct("<QQ")
_WEIGHTS: dict[int, np.dtype] = {1: np.dtype(np.uint8), 4: np.dtype("<f4")}


class StoredDocument(NamedTuple):
    """A document as it was written."""

    tokens: np.ndarray
    weights: np.ndarray | None
    columns: Mapping[str, np.ndarray]
    origin: str
    num_bytes: int  # in the file


class SortedWriter:
    """Writes the documents of one unit and split; it keeps one run in memory.

    Args:
        prefix: path without suffix; the last part of the path names the unit.
        vocab_size: exclusive limit of the ids.
        seed: of the random order.
        columns: further columns of the documents.
    """

    def __init__(
        self,
        prefix: str | Path,
        *,
        vocab_size: int,
        seed: int,
        columns: Mapping[str, Column] = NO_COLUMNS,
    ):
        self._key = f"{seed}/{Path(prefix).name}"
        self._vocab_size, self._dtype, self._columns = vocab_size, token_type(vocab_size), columns
        self._file = open(f"{prefix}{SUFFIX}", "wb")  # noqa: SIM115 - closed by `abandon`
        self._records: list[bytes] = []  # of the open run, without keys
        self._record_bytes = 0
        self._tables: list[np.ndarray] = []
        self.num_documents = self.num_tokens = 0

    def write(
        self,
        tokens: np.ndarray,
        weights: np.ndarray | None = None,
        columns: Mapping[str, Any] = NO_COLUMNS,
        *,
        origin: str = "",
    ) -> None:
        """Append a document; ConfigError if a token id is out of range."""
        check_ids(tokens, self._vocab_size, origin)
        name, weight_bytes, values = origin.encode("utf-8", "replace"), 0, b""
        if weights is not None:
            dtype = weights_type(weights)
            weight_bytes, values = dtype.itemsize, np.asarray(weights, dtype).tobytes()
        sizes = _SIZES.pack(len(tokens), len(name), weight_bytes)
        further = b"".join(
            check_values(each, column, columns.get(each), len(tokens), origin).tobytes()
            for each, column in self._columns.items()
        )
        record = b"".join((sizes, tokens.astype(self._dtype).tobytes(), values, further, name))
        self._records.append(record)
        self._record_bytes += len(record)
        self.num_documents += 1
        self.num_tokens += len(tokens)
        if self._record_bytes >= RUN_BYTES:
            self._write_run()

    def close(self, meta: Mapping[str, Any] | None = None) -> None:
        """Write the last run and the tables."""
        self._write_run()
        documents = self.num_documents // len(self._tables)
        bits = min(_MAX_RANGE_BITS, (documents // _RANGE_DOCUMENTS).bit_length())
        for table in self._tables:
            self._file.write(table[:: 1 << _MAX_RANGE_BITS - bits].astype("<u8").tobytes())
        self._file.write(_TAIL.pack(len(self._tables), bits))
        self._file.close()

    def abandon(self) -> None:
        """Close the file without finishing it."""
        self._file.close()

    def _write_run(self) -> None:
        records = self._records
        numbers = np.arange(self.num_documents - len(records), self.num_documents)
        keys = keyed_bits(numbers, self._key)
        order = np.argsort(keys)
        sizes = np.fromiter(map(len, records), np.int64, len(records)) + _NUMBER.size
        begins = self._file.tell() + np.concatenate([[0], np.cumsum(sizes[order])])
        ranges = keys[order] >> np.uint64(64 - _MAX_RANGE_BITS)
        firsts = np.searchsorted(ranges, np.arange((1 << _MAX_RANGE_BITS) + 1, dtype=np.uint64))
        self._tables.append(begins[firsts])
        for number in _in_parts(order):
            self._file.write(_NUMBER.pack(keys[number]))
            self._file.write(records[number])
        self._records, self._record_bytes = [], 0


def read_bucket(
    paths: Sequence[Path],
    bucket: int,
    buckets: int,
    vocab_size: int,
    columns: Mapping[str, Column] = NO_COLUMNS,
) -> Iterator[StoredDocument]:
    """Yield the documents of a bucket in the order of their keys.

    All of the bucket is kept in memory, and 28 bytes per document. Documents with the same key
    follow the order of the paths.

    Args:
        buckets: number of buckets, a power of two.
    """
    bits = buckets.bit_length() - 1
    first, stop = (number << 64 - bits for number in (bucket, bucket + 1))
    pieces = [piece for path in paths for piece in _pieces(path, first, stop)]
    keys, places, begins = array("Q"), array("I"), array("Q")
    layout = _Layout(token_type(vocab_size), columns)
    for place, piece in enumerate(pieces):
        begin = 0
        while begin < len(piece):
            key, num_bytes = layout.size_at(piece, begin)
            if first <= key < stop:
                keys.append(key)
                places.append(place)
                begins.append(begin)
            begin += num_bytes
    for number in _in_parts(np.argsort(np.asarray(keys), kind="stable")):
        yield layout.document_at(pieces[places[number]], begins[number])


def _in_parts(numbers: np.ndarray) -> Iterator[int]:
    """Yield numbers; a list of all of them would take forty bytes for each."""
    for begin in range(0, len(numbers), 4096):
        yield from numbers[begin : begin + 4096].tolist()


def _pieces(path: Path, first: int, stop: int) -> Iterator[bytes]:
    """Yield the bytes of each run of a file that contain all documents with keys in a range."""
    with open(path, "rb") as file:
        end = file.seek(-_TAIL.size, io.SEEK_END)
        runs, bits = _TAIL.unpack(file.read(_TAIL.size))
        bounds = first >> 64 - bits, (stop - 1 >> 64 - bits) + 1
        table_bytes = _NUMBER.size * ((1 << bits) + 1)
        for table in range(end - runs * table_bytes, end, table_bytes):
            begin, after = (_read_number(file, table + _NUMBER.size * bound) for bound in bounds)
            if after > begin:
                file.seek(begin)
                yield file.read(after - begin)


def _read_number(file: BinaryIO, place: int) -> int:
    file.seek(place)
    return int(_NUMBER.unpack(file.read(_NUMBER.size))[0])


class _Layout:
    """The places of the parts of a document in a piece."""

    def __init__(self, dtype: np.dtype, columns: Mapping[str, Column]):
        self._dtype, self._columns = dtype, columns
        sizes = {"token": 0, "document": 0}
        for column in columns.values():
            sizes[column.per] += column.item_bytes
        self._token_bytes, self._document_bytes = sizes["token"] + dtype.itemsize, sizes["document"]

    def size_at(self, piece: bytes, begin: int) -> tuple[int, int]:
        """Return the key and the size of the document at a byte."""
        (key,) = _NUMBER.unpack_from(piece, begin)
        tokens, name_bytes, weight_bytes = _SIZES.unpack_from(piece, begin + _NUMBER.size)
        own = _HEADER_BYTES + self._document_bytes + name_bytes
        return key, own + tokens * (self._token_bytes + weight_bytes)

    def document_at(self, piece: bytes, begin: int) -> StoredDocument:
        count, name_bytes, weight_bytes = _SIZES.unpack_from(piece, begin + _NUMBER.size)
        at = begin + _HEADER_BYTES
        tokens = np.frombuffer(piece, self._dtype, count, at)
        at += tokens.nbytes
        weights = np.frombuffer(piece, _WEIGHTS[weight_bytes], count, at) if weight_bytes else None
        at += count * weight_bytes
        columns = {}
        for name, column in self._columns.items():
            shape = (count, *column.item) if column.per == "token" else column.item
            columns[name] = np.frombuffer(piece, column.dtype, math.prod(shape), at).reshape(shape)
            at += columns[name].nbytes
        origin = piece[at : at + name_bytes].decode("utf-8")
        return StoredDocument(tokens, weights, columns, origin, at + name_bytes - begin)
