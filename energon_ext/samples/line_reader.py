# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Samples of a JSON Lines file by number, each in one read.

Energon's reader keeps up to six files open per source.
"""

from __future__ import annotations

import contextlib
from typing import Any

from megatron.energon.flavors.jsonl.ijsonl_reader import IJsonlReader
from megatron.energon.flavors.webdataset.structs import FilteredSample, ShardInfo
from megatron.energon.source_info import SourceInfo

from energon_ext.errors import ConfigError
from energon_ext.samples.jsonl_index import refuse_returns
from energon_ext.samples.shards import shards_of


class LineReader:
    """Reads samples by number like Energon's reader, and rejects any that is not one line."""

    def __init__(self, reader: IJsonlReader):
        self._reader: Any = reader
        path, self._count = reader.jsonl_path, len(reader)
        self.shards = shards_of([ShardInfo(name=path.name, path=path, count=self._count)])

    def __getitem__(self, number: int) -> FilteredSample | None:
        """Read a sample; None if the split excludes it."""
        sample = self._sample(number)
        if sample is None:
            return None
        line = sample["json"]
        refuse_returns(line, f"{self._reader.jsonl_path}: line {number + 1}")
        is_last = number + 1 == self._count
        if b"\n" in line.strip() or not (is_last or line.endswith(b"\n")):
            path = self._reader.jsonl_path
            raise ConfigError(
                f"{path}: its index does not match line {number + 1}; remove {path}.idx, and the "
                f"next start writes it again."
            )
        return sample

    def prefetch(self, number: int) -> None:
        """Prefetch a sample if possible; errors are raised when it is read."""
        with contextlib.suppress(OSError, ValueError, ConfigError):
            self.shards.prefetch(0, *self._place(number))

    def _place(self, number: int) -> tuple[int, int]:
        """Return the first byte of a line, and its size in bytes."""
        begin, end = self.shards.ends(0)[number : number + 2].tolist()
        if begin >= end:
            raise ValueError(f"line {number + 1} has no bytes in the index")
        return begin, end - begin

    def _sample(self, number: int) -> FilteredSample | None:
        reader, key = self._reader, str(number)
        if reader.sample_filter is not None and not reader.sample_filter(key):
            return None
        begin, size = self._place(number)
        line = self.shards.read(0, begin, size)
        if len(line) < size:
            raise ValueError(f"line {number + 1} is cut")
        path = reader.jsonl_path
        return FilteredSample(
            __key__=key,
            __shard__=path.name,
            __restore_key__=("Webdataset", number),
            __sources__=(
                SourceInfo(
                    dataset_path=str(path),
                    index=number,
                    shard_name=path.name,
                    file_names=(f"{key}.json",),
                ),
            ),
            json=line,
        )
