# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Samples of tar files by number, each in one read.

Energon's reader looks for the headers of a sample one after another, opens the index anew for each
look-up, and keeps what it found of every sample. It still reads whatever is not plain: another file
system, a join, a header with an extension.
"""

from __future__ import annotations

import contextlib
import re
from bisect import bisect_right
from typing import Any

from megatron.energon.flavors.webdataset.config import skip_meta_re, split_name_re
from megatron.energon.flavors.webdataset.itar_reader import ITarReader, ShardInfosITarReader
from megatron.energon.flavors.webdataset.structs import FilteredSample
from megatron.energon.source_info import SourceInfo

from energon_ext.errors import ConfigError
from energon_ext.samples.shards import Shards, shards_of

_BLOCK = 512
_PLAIN = (b"ustar\x0000", b"ustar  \x00")

#: Bytes of a sample, and of an extended header; tarfile takes the square of the second in time
#: before Python 3.11.10 (CVE-2024-6232).
MOST_SAMPLE_BYTES, MOST_HEADER_BYTES = 1 << 31, 1 << 14


class TarReader:
    """Reads by number what a reader of Energon would."""

    def __init__(self, reader: ITarReader[int]):
        self._reader: Any = reader
        is_numbered = isinstance(reader, ShardInfosITarReader)
        self.shards = shards_of(reader.shard_infos) if is_numbered else None

    def __getitem__(self, number: int) -> FilteredSample | None:
        """A sample; None where the split excludes it."""
        files = None if self.shards is None else self._files(self.shards, number)
        if files:
            return self._sample(number, files)
        sample = self._reader[number]
        for tar in self._reader.itar_files_cache.values():
            tar.members.clear()  # one for every sample that was read
        return sample

    def announce(self, number: int) -> None:
        """Let a sample be read ahead; where that fails, reading it says why."""
        if self.shards is not None:
            with contextlib.suppress(OSError, ValueError, ConfigError):
                self.shards.announce(*self._place(self.shards, number))

    def _place(self, shards: Shards, number: int) -> tuple[int, int, int]:
        """The shard of a sample, where the sample begins in it, and its bytes."""
        shard = self._shard_of(number)
        first = number - self._reader.shard_count_cumsum[shard]
        begin, end = shards.ends(shard)[first : first + 2].tolist()
        if not 0 <= end - begin <= MOST_SAMPLE_BYTES:
            raise ValueError(f"{end - begin:,} bytes, 0 to {MOST_SAMPLE_BYTES:,} are read")
        return shard, begin, end - begin

    def _files(self, shards: Shards, number: int) -> list[tuple[str, bytes]] | None:
        """Names and contents of the files of a sample; None where they are not plain."""
        shard, begin, size = self._place(shards, number)
        content = shards.read(shard, begin, size)
        return plain_files(content) if len(content) == size else None

    def _shard_of(self, number: int) -> int:
        return bisect_right(self._reader.shard_count_cumsum, number) - 1

    def _sample(self, number: int, files: list[tuple[str, bytes]]) -> FilteredSample | None:
        """The files of a sample as Energon hands them on."""
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
            raise ValueError(f"{shard.name}: sample {number} has files of {sorted(keys) or 'none'}")
        (key,) = keys
        if reader.sample_filter is not None and not reader.sample_filter(f"{shard.name}/{key}"):
            return None
        source = SourceInfo(
            dataset_path=reader.base_path,
            index=number,
            shard_name=shard.name,
            file_names=tuple(names),
        )
        about = {"__restore_key__": ("Webdataset", number), "__sources__": (source,)}
        return FilteredSample(__key__=key, __shard__=shard.name, **about, **parts)


def plain_files(content: bytes) -> list[tuple[str, bytes]] | None:
    """Names and contents of the files in a part of a tar; None where a header is not plain.

    ValueError where one would make more of it than it has.
    """
    files, begin, is_plain = [], 0, True
    while begin + _BLOCK <= len(content):
        header = content[begin : begin + _BLOCK]
        kind, size = header[156:157], int(header[124:136].rstrip(b" \0") or b"0", 8)
        is_plain &= header[257:265] in _PLAIN and kind in b"0\0" and not header[345]
        begin += _BLOCK
        part = content[begin : begin + size]
        if kind in b"xgXLK" and (
            size > MOST_HEADER_BYTES or re.search(rb"GNU\.sparse| size=", part)
        ):
            raise ValueError(f"an extended header of {size:,} bytes, or a sparse file")
        if kind == b"S":
            raise ValueError("a sparse file, of any size")
        files.append((header[:100].rstrip(b"\0"), part))
        begin += -(-size // _BLOCK) * _BLOCK
    try:
        whole = is_plain and begin == len(content)
        return [(name.decode(), part) for name, part in files] if whole else None
    except UnicodeDecodeError:
        return None
