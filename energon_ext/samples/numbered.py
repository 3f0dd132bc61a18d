# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Samples of an Energon dataset by number.

Energon numbers the samples of a webdataset, of a JSONL file and of a join from 0 on, in the order
of their index. Its loaders are readers by number with functions over them, that decode and cook.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from megatron.energon import WorkerConfig
from megatron.energon.flavors.base_dataset import SavableDataset
from megatron.energon.flavors.jsonl.ijsonl_reader import IJsonlReader
from megatron.energon.flavors.webdataset.itar_reader import ITarReader
from megatron.energon.flavors.webdataset.sample_loader import (
    RawSampleData,
    WebdatasetSampleLoaderDataset,
)
from megatron.energon.wrappers.map_dataset import MapDataset

from energon_ext.errors import ConfigError, StoreError
from energon_ext.samples.shards import StoredShards
from energon_ext.samples.tar_reader import TarReader

#: One rank without workers.
ALONE = WorkerConfig(rank=0, world_size=1, num_workers=0)


class LineReader:
    """Reads by number what a reader of Energon would, and refuses what is not one line."""

    def __init__(self, reader: IJsonlReader):
        self._reader: Any = reader

    def __getitem__(self, number: int) -> Any:
        sample = self._reader[number]
        line = sample["json"] if sample else b""
        is_last = number + 1 == len(self._reader)
        if b"\n" in line.strip() or not (is_last or line.endswith(b"\n")):
            path = self._reader.jsonl_path
            raise ConfigError(
                f"{path}: its index says where line {number + 1} is, and it is not; remove "
                f"{path}.idx, and the next start makes it again."
            )
        return sample


def guard_readers(dataset: Any) -> Any:
    """Let a dataset read by readers that check what an index says; returns the dataset."""
    inner = dataset
    while isinstance(inner, MapDataset):
        inner = inner.dataset
    if isinstance(inner, WebdatasetSampleLoaderDataset):
        inner.join_readers = [_guarded(reader) for reader in inner.join_readers]
    return dataset


def _guarded(reader: Any) -> Any:
    if isinstance(reader, IJsonlReader):
        return LineReader(reader)
    return TarReader(reader) if isinstance(reader, ITarReader) else reader


class NumberedSamples:
    """Reads samples of a dataset, as an encoder's ``_load_dataset`` builds it, in any order."""

    def __init__(self, dataset: SavableDataset, path: str):
        self.path = path
        self._stages: list[Callable[[Any], Any]] = []
        inner: Any = guard_readers(dataset)
        while isinstance(inner, MapDataset):
            self._stages.insert(0, inner.map_fn)
            inner = inner.dataset
        if not isinstance(inner, WebdatasetSampleLoaderDataset):
            raise ConfigError(
                f"{path}: a {type(inner).__name__} has no samples by number; write it as JSON "
                f"Lines."
            )
        self._readers = inner.join_readers

    def stored(self, number: int) -> Any:
        """A sample as it is stored, for :meth:`cooked`; None where the split excludes it."""
        try:
            data = tuple(reader[number] for reader in self._readers)
        except StoreError:
            raise
        except Exception as error:  # whatever Energon raises of a damaged file
            raise ConfigError(
                f"{self.path}: sample {number} cannot be read ({error}); copy its files again."
            ) from error
        if data[0] is None:
            return None
        return RawSampleData(__restore_key__=("Webdataset", number), data=data)

    def announce(self, number: int) -> None:
        """Tell the system or the store that a sample is read soon, where its files are tars."""
        for reader in self._readers:
            if isinstance(reader, TarReader):
                reader.announce(number)

    def stored_bytes(self) -> int:
        """Of a sample in an object store on average; 0 where nothing is in one."""
        shards = [reader.shards for reader in self._readers if isinstance(reader, TarReader)]
        return sum(each.sample_bytes() for each in shards if isinstance(each, StoredShards))

    def cooked(self, stored: Any) -> Any:
        """A stored sample as the encoder gets it; raises whatever decoders and cookers do."""
        sample = stored
        for stage in self._stages:
            sample = stage(sample)
        return sample


@contextlib.contextmanager
def as_worker() -> Iterator[None]:
    """Work as the one worker of one rank; decorators of Energon ask for a worker."""
    ALONE.worker_activate(0)
    try:
        yield
    finally:
        ALONE.worker_deactivate()


def key_of(stored: Any) -> str:
    """The key of a stored sample."""
    return str(stored.data[0]["__key__"])
