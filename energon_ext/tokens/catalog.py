# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The catalog of a source: what is known of its pairs once all their indices were checked.

It is one JSON file of columns, with a number per pair: 10 000 pairs are parsed in 20 ms, where
reading their headers would ask the file system 100 000 times. Its second line is a digest of the
first. Its name is a digest of the folder and of the names of all files, so a file that is added or
removed gives another catalog. Whether the files are still those that were checked is tested apart,
see :mod:`~energon_ext.tokens.unchanged`.
"""

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from energon_ext.data_files import cache_path, count_of, parse_json, read_data, reading
from energon_ext.errors import ConfigError
from energon_ext.keyed import sha256, sha256_of_file
from energon_ext.storage.checked_array import CheckedArray, CheckedWriter
from energon_ext.storage.whole_file import open_whole
from energon_ext.tokens.documents import FileFacts
from energon_ext.tokens.index import (
    ALL_SUFFIXES,
    BOTH_FILES,
    META_SUFFIX,
    SUFFIXES,
    Pair,
    check_index,
    map_index,
    pair_of,
    read_pair,
)
from energon_ext.tokens.lookup import document_lengths

_VERSION = 2
_MAX_BYTES = 2**31

#: Bytes that are hashed at once, and documents whose lengths are written at once.
_CHUNK = 1 << 22

#: The files of each pair by their suffixes, see :func:`~energon_ext.tokens.paths.list_pairs`.
Listing = Mapping[str, set[str]]


@dataclass(frozen=True)
class Stamp:
    """Times and a digest that reveal a change of a pair.

    Attributes:
        times: modification times of ``.bin`` and ``.idx`` in ns when the digest was that of the
            ``.idx``; empty if it was not compared yet.
        digest: SHA-256 of the ``.idx``.
    """

    times: tuple[int, ...]
    digest: str


@dataclass(frozen=True)
class Catalog:
    """The pairs of a source, and what reveals that one has changed.

    Attributes:
        path: of its file, for messages.
        advice: what to do if a file was replaced on purpose.
    """

    path: str
    pairs: Sequence[Pair]
    stamps: Sequence[Stamp]
    advice: str


def root_of(listing: Listing) -> str:
    """Return the innermost folder that contains all pairs of a sorted listing."""
    prefixes = list(listing)
    first, last = os.path.dirname(prefixes[0]), os.path.dirname(prefixes[-1])
    return os.path.commonpath([first, last]) if first != last else first


def catalog_path(listing: Listing) -> Path:
    """Return where the catalog of a source is kept, whether it exists or not."""
    root = os.path.realpath(root_of(listing))
    text = json.dumps([root, _names(listing), [sorted(files) for files in listing.values()]])
    return cache_path(Path(root), os.path.basename(root), text, ".catalog.json")


def _names(listing: Listing) -> list[str]:
    """Return the names of the pairs below their common folder."""
    begin = len(os.path.join(root_of(listing), ""))
    return [prefix[begin:] for prefix in listing]


# Checking ---------------------------------------------------------------------------------------


def check_pair(
    prefix: str,
    files: set[str] | None = None,
    advance: Callable[[int], None] = lambda num_bytes: None,
) -> tuple[Pair, Stamp]:
    """Read the header of a pair, and check all of its index.

    Args:
        advance: called with the number of bytes checked since the last call.
    """
    # The times come first: a file that is changed during the check is then read again.
    times = times_of(prefix)
    pair = read_pair(prefix, ALL_SUFFIXES if files is None else files)
    is_one = check_index(pair, map_index(pair, prefix + ".idx"), advance)
    digest = digest_of(prefix + ".idx")
    return replace(pair, one_sequence_each=is_one), Stamp(times, digest)


def times_of(prefix: str) -> tuple[int, ...]:
    """Return the modification times of the files of a pair; ConfigError if one is missing."""
    return tuple(_time_of(prefix + suffix) for suffix in SUFFIXES)


def _time_of(path: str) -> int:
    with reading(path, BOTH_FILES):
        return os.stat(path).st_mtime_ns


def digest_of(path: str, beat: Callable[[], None] = lambda: None) -> str:
    """Return the SHA-256 of a file; ConfigError if it cannot be read.

    Args:
        beat: called after each part that was read.
    """
    with reading(path):
        return sha256_of_file(Path(path), beat)


def describe_pairs(pairs: Sequence[Pair], digests: Sequence[str] | None) -> list[FileFacts]:
    """Return the counts of pairs and the beginnings of the digests of their indices."""
    return [
        FileFacts(
            pair.prefix,
            f"{pair.documents:,} documents, {pair.tokens:,} tokens, index {digest[:12]}",
        )
        for pair, digest in zip(pairs, digests or map(_digest_of_index, pairs))
    ]


def _digest_of_index(pair: Pair) -> str:
    """Return the digest of an index, or of its version in an object store."""
    if pair.objects is None:
        return digest_of(f"{pair.prefix}.idx")
    index = pair.objects[".idx"]
    return index.sha256 or sha256(str(index.version or index.size))


# The file ---------------------------------------------------------------------------------------


def write_catalog(path: Path, listing: Listing, checked: Sequence[tuple[Pair, Stamp]]) -> Catalog:
    """Write the catalog of checked pairs to a temporary file, and rename it.

    Raises:
        OSError: the folder cannot be written to.
    """
    metas: dict[str, int] = {}
    numbers = []
    for pair, _ in checked:
        text = json.dumps(pair.meta)
        numbers.append(metas.setdefault(text, len(metas)))
    pairs = [pair for pair, _ in checked]
    content = {
        "version": _VERSION,
        "folder": os.path.realpath(root_of(listing)),
        "names": _names(listing),
        "documents": [pair.documents for pair in pairs],
        "sequences": [pair.sequences for pair in pairs],
        "tokens": [pair.tokens for pair in pairs],
        "types": [pair.dtype.str for pair in pairs],
        "one_sequence_each": [pair.one_sequence_each for pair in pairs],
        "times": [stamp.times for _, stamp in checked],
        "digests": [stamp.digest for _, stamp in checked],
        "metas": [json.loads(text) for text in metas],
        "meta": numbers,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    line = json.dumps(content).encode()
    with open_whole(path) as file:
        file.write(line + f"\n{sha256(line)}\n".encode())
    return _catalog(path, pairs, [stamp for _, stamp in checked])


def read_catalog(path: Path, listing: Listing) -> Catalog | None:
    """Read the catalog of a source; None if there is none that can be read and fits its names."""
    try:
        line, digest, _ = read_data(path, _MAX_BYTES).split(b"\n")
        content = parse_json(line) if sha256(line).encode() == digest else None
        if content is None or content["version"] != _VERSION or content["names"] != _names(listing):
            return None
        rows = list(zip(*(content[name] for name in _COLUMNS), strict=True))
        pairs = [
            _pair(prefix, files, row, content["metas"])
            for (prefix, files), row in zip(listing.items(), rows)
        ]
        stamps = [Stamp((count_of(row[6][0]), count_of(row[6][1])), str(row[7])) for row in rows]
    except (OSError, ValueError, KeyError, IndexError, TypeError):
        return None  # damaged, or of another version; making it again costs only time
    return _catalog(path, pairs, stamps)


_COLUMNS = (
    *("names", "documents", "sequences", "tokens", "types", "one_sequence_each", "times"),
    *("digests", "meta"),
)


def _pair(prefix: str, files: set[str], row: Sequence[Any], metas: Sequence[Any]) -> Pair:
    _, documents, sequences, tokens, kind, is_one, _, _, meta = row
    dtype = np.dtype(kind)
    if dtype.kind not in "iu":
        raise ValueError("not a type of tokens")
    header = dtype, count_of(sequences), count_of(documents), count_of(tokens) * dtype.itemsize
    found = metas[meta]
    if (found is None) == (META_SUFFIX in files):
        raise ValueError("another meta file")
    return pair_of(prefix, header, header[-1], found, None, bool(is_one))


def _catalog(path: Path, pairs: Sequence[Pair], stamps: Sequence[Stamp]) -> Catalog:
    return Catalog(str(path), pairs, stamps, "check it again with `energon-ext check`")


# Lengths ----------------------------------------------------------------------------------------


def lengths_path(path: Path, stamps: Iterable[Stamp]) -> Path:
    """Return where the lengths of the documents of a source are kept, next to its catalog.

    Pairs that were written again under the same names have other lengths in another file.
    """
    digest = sha256(*(stamp.digest for stamp in stamps))
    return path.with_name(path.name.replace(".catalog.json", f"-{digest[:24]}.lengths.u4"))


def write_lengths(
    path: Path, pairs: Sequence[Pair], beat: Callable[[], None] = lambda: None
) -> CheckedArray:
    """Write the lengths of all documents of some pairs to one file, as uint32 with checksums.

    Args:
        beat: called after each pair.

    Raises:
        OSError: the folder cannot be written to.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open_whole(path) as file:
        items = CheckedWriter(file)
        for pair in pairs:
            for begin in range(0, pair.documents, _CHUNK):
                numbers = np.arange(begin, min(begin + _CHUNK, pair.documents))
                items.write(document_lengths(pair, numbers).astype("<u4"))
            beat()
        items.close()
    return CheckedArray(str(path), "<u4")


def read_lengths(path: Path, documents: int) -> CheckedArray | None:
    """Map the lengths of the documents of a source; None if there is no file of that size."""
    try:
        return CheckedArray(str(path), "<u4", documents)
    except (OSError, ConfigError):
        return None
