# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Samples of tar files by number, each in one read.

Energon's reader seeks to the headers of a sample one by one, opens the index again for each lookup,
and keeps the headers of every sample it has read. It is still used for everything that is not
plain: joins and extended headers.
"""

from __future__ import annotations

import contextlib
import re
from bisect import bisect_right
from typing import Any

from megatron.energon.flavors.webdataset.config import skip_meta_re, split_name_re
from megatron.energon.flavors.webdataset.itar_reader import (
    ITarReader,
    JoinIndexFileITarReader,
    ShardInfosITarReader,
)
from megatron.energon.flavors.webdataset.structs import FilteredSample
from megatron.energon.source_info import SourceInfo

from energon_ext.compat import joined_shard
from energon_ext.errors import ConfigError
from energon_ext.samples.shards import Shards, shards_of

_BLOCK = 512
_PLAIN = (b"ustar\x0000", b"ustar  \x00")

#: Maximum bytes of a sample, and of an extended header; before Python 3.11.10, tarfile takes
#: quadratic time for such a header (CVE-2024-6232).
MAX_SAMPLE_BYTES, MAX_HEADER_BYTES = 1 << 31, 1 << 14


class TarReader:
    """Reads samples by number like Energon's reader."""

    def __init__(self, reader: ITarReader[int]):
        self._reader: Any = reader
        is_numbered = isinstance(reader, ShardInfosITarReader)
        self.shards = shards_of(reader.shard_infos) if is_numbered else None
        # The first dataset of a join has every sample.
        self._may_lack = isinstance(reader, JoinIndexFileITarReader) and reader.column > 0

    def __getitem__(self, number: int) -> FilteredSample | None:
        """Read a sample; None if the split excludes it, or a joined dataset does not have it."""
        if self._may_lack and joined_shard(self._reader, number) < 0:
            return None  # `nonmatch: none`; Energon 7.4.1 looks for it in the last shard
        files = None if self.shards is None else self._files(self.shards, number)
        if files:
            return self._sample(number, files)
        sample = self._reader[number]
        for tar in self._reader.itar_files_cache.values():
            tar.members.clear()  # it would grow with every sample
        return sample

    def prefetch(self, number: int) -> None:
        """Prefetch a sample if possible; errors are raised when it is read."""
        if self.shards is not None:
            with contextlib.suppress(OSError, ValueError, ConfigError):
                self.shards.prefetch(*self._place(self.shards, number))

    def _place(self, shards: Shards, number: int) -> tuple[int, int, int]:
        """Return the shard of a sample, its first byte in the shard, and its size in bytes."""
        shard = self._shard_of(number)
        first = number - self._reader.shard_count_cumsum[shard]
        begin, end = shards.ends(shard)[first : first + 2].tolist()
        if not 0 <= end - begin <= MAX_SAMPLE_BYTES:
            raise ValueError(f"{end - begin:,} bytes, must be 0 to {MAX_SAMPLE_BYTES:,}")
        return shard, begin, end - begin

    def _files(self, shards: Shards, number: int) -> list[tuple[str, bytes]] | None:
        """Read the names and contents of a sample's files; None if they are not plain."""
        shard, begin, size = self._place(shards, number)
        content = shards.read(shard, begin, size)
        return plain_files(content) if len(content) == size else None

    def _shard_of(self, number: int) -> int:
        return bisect_right(self._reader.shard_count_cumsum, number) - 1

    def _sample(self, number: int, files: list[tuple[str, bytes]]) -> FilteredSample | None:
        """Convert the files of a sample to Energon's type; None if the split excludes it."""
        reader, shard = self._reader, self._reader.shard_infos[self._shard_of(number)]
        keys, parts, names = set(), {}, []
        for name, content in files:
            match = None if skip_meta_re.match(name) else split_name_re.match(name)
            if match is None:
                continue
            keys.add(match[1])
            if reader.part_filter is None or reader.part_filter(match[2]):
                parts[match[2]] = content
                names.append(name)
        if len(keys) != 1:
            raise ValueError(f"{shard.name}: sample {number} needs one key, found {sorted(keys)}")
        (key,) = keys
        if reader.sample_filter is not None and not reader.sample_filter(f"{shard.name}/{key}"):
            return None
        source = SourceInfo(
            dataset_path=reader.base_path,
            index=number,
            shard_name=shard.name,
            file_names=tuple(names),
        )
        meta = {"__restore_key__": ("Webdataset", number), "__sources__": (source,)}
        return FilteredSample(__key__=key, __shard__=shard.name, **meta, **parts)


def plain_files(content: bytes) -> list[tuple[str, bytes]] | None:
    """Parse the names and contents of the files in a part of a tar; None if a header is not plain.

    ValueError if the content could expand to more than its size.
    """
    files, begin, is_plain = [], 0, True
    while begin + _BLOCK <= len(content):
        header = content[begin : begin + _BLOCK]
        kind, size = header[156:157], int(header[124:136].rstrip(b" \0") or b"0", 8)
        is_plain &= header[257:265] in _PLAIN and kind in b"0\0" and not header[345]
        begin += _BLOCK
        part = content[begin : begin + size]
        if kind in b"xgXLK" and (
            size > MAX_HEADER_BYTES or re.search(rb"GNU\.sparse| size=", part)
        ):
            raise ValueError(f"it has an extended header of {size:,} bytes, or a sparse file")
        if kind == b"S":
            raise ValueError("it has a sparse file")
        files.append((header[:100].rstrip(b"\0"), part))
        begin += -(-size // _BLOCK) * _BLOCK
    try:
        whole = is_plain and begin == len(content)
        return [(name.decode(), part) for name, part in files] if whole else None
    except UnicodeDecodeError:
        return None
