# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The shards of a webdataset, as local files or objects in a store, read by byte ranges."""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import weakref
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from megatron.energon.flavors.webdataset.structs import ShardInfo

from energon_ext.data_files import open_descriptor
from energon_ext.samples.stored_files import sample_ends
from energon_ext.storage.object_store import StoredObject, file_at, file_name
from energon_ext.storage.range_reader import range_reader

#: Local shards that a process keeps open, if its limit of open files allows it.
MAX_OPEN = 1024

#: The open shards of all sources, the most recently used one last: descriptor and ends of samples,
#: by the numbers of the :class:`LocalShards` and of the shard in it.
_opened: OrderedDict[tuple[int, int], tuple[int, np.ndarray]] = OrderedDict()

_numbers = itertools.count()


def _most_open() -> int:
    """Return how many shards may be open; other code needs most of the process's open files."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_OPEN if allowed == resource.RLIM_INFINITY else max(1, min(MAX_OPEN, allowed // 4))


def _close_all(number: int) -> None:
    """Close the open shards of the :class:`LocalShards` with a number."""
    for key in [key for key in _opened if key[0] == number]:
        os.close(_opened.pop(key)[0])


class LocalShards:
    """Shards in local files; a process keeps those open that it used last, of all its sources."""

    def __init__(self, infos: Sequence[ShardInfo]):
        self.infos = infos
        self._number = next(_numbers)
        weakref.finalize(self, _close_all, self._number)

    def ends(self, shard: int) -> np.ndarray:
        """Return the starts of the samples and the end of the last one, uint64 [samples + 1]."""
        return self._open(shard)[1]

    def read(self, shard: int, begin: int, size: int) -> bytes:
        """Read a part of a shard; it is shorter at the end of the shard."""
        return os.pread(self._open(shard)[0], size, begin)

    def prefetch(self, shard: int, begin: int, size: int) -> None:
        """Prefetch a part if possible; errors are raised when it is read."""
        if hasattr(os, "posix_fadvise"):
            with contextlib.suppress(OSError, OverflowError):
                os.posix_fadvise(self._open(shard)[0], begin, size, os.POSIX_FADV_WILLNEED)

    def _open(self, shard: int) -> tuple[int, np.ndarray]:
        """Return the descriptor of a shard and the ends of its samples."""
        key = self._number, shard
        if key in _opened:
            _opened.move_to_end(key)
        else:
            path = file_name(self.infos[shard].path)
            ends = sample_ends(f"{path}.idx", self.infos[shard].count)
            while len(_opened) >= _most_open():
                os.close(_opened.popitem(last=False)[1][0])
            _opened[key] = open_descriptor(path), ends
        return _opened[key]


class StoredShards:
    """Shards in an object store; their indices are copied to the node once."""

    def __init__(self, infos: Sequence[ShardInfo]):
        self.infos = infos
        self._found: list[tuple[StoredObject, np.ndarray]] = []

    def sample_bytes(self) -> int:
        """Return the average bytes per sample."""
        samples = sum(info.count for info in self.infos)
        return sum(stored.size for stored, _ in self._all()) // max(1, samples)

    def ends(self, shard: int) -> np.ndarray:
        return self._all()[shard][1]

    def read(self, shard: int, begin: int, size: int) -> bytes:
        return range_reader().take(self._all()[shard][0], begin, size)

    def prefetch(self, shard: int, begin: int, size: int) -> None:
        range_reader().prefetch(self._all()[shard][0], begin, size)

    def _all(self) -> list[tuple[StoredObject, np.ndarray]]:
        """Look up all shards and their indices, once and in parallel."""
        if not self._found:
            calls = [lambda info=info: _look_up(info) for info in self.infos]
            self._found = range_reader().run_all(calls)
        return self._found


def _look_up(info: ShardInfo) -> tuple[StoredObject, np.ndarray]:
    name = file_name(info.path)
    return file_at(name), sample_ends(f"{name}.idx", info.count)


Shards = LocalShards | StoredShards


def shards_of(infos: Sequence[ShardInfo]) -> Shards:
    """Return the shards of a dataset, which are all below one folder."""
    is_local = all(info.path.is_local() for info in infos[:1])
    return LocalShards(infos) if is_local else StoredShards(infos)
