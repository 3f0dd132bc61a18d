# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Samples of an Energon dataset by number.

Energon numbers the samples of a webdataset, a JSONL file or a join from 0, in the order of the
index. Its loaders read by number, then apply functions that decode and cook a sample.
"""

import contextlib
import functools
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

from energon_ext.data_files import RepeatedKeyError, parse_record
from energon_ext.errors import ConfigError, EnergonExtError, SampleError
from energon_ext.plan.lookup import stages_in
from energon_ext.samples.line_reader import LineReader
from energon_ext.samples.shards import StoredShards
from energon_ext.samples.tar_reader import TarReader
from energon_ext.tokens.documents import FileFacts

_LOADER = WebdatasetSampleLoaderDataset

#: One rank without workers.
ALONE = WorkerConfig(rank=0, world_size=1, num_workers=0)


def guard_readers(dataset: Any) -> Any:
    """Make a dataset check what it reads: against its index, and for keys that are there twice.

    Returns the dataset.
    """
    if (loader := loader_in(dataset)) is None:
        return dataset
    loader.join_readers = [_guard(reader) for reader in loader.join_readers]
    lines = [n for n, reader in enumerate(loader.join_readers) if isinstance(reader, LineReader)]
    *around, _ = stages_in(dataset)
    if lines and around and isinstance(first := around[-1], MapDataset):
        load = functools.partial(_load_lines, first.map_fn, lines)
        first.map_fn = functools.update_wrapper(
            load, first.map_fn
        )  # named alike in Energon's states
    return dataset


def _load_lines(load: Callable[[Any], Any], lines: list[int], stored: RawSampleData) -> Any:
    """Load a stored sample of which some parts are lines; Energon would keep the last of two keys.

    Raises:
        SampleError: a key is there twice.
    """
    try:
        for number in lines:
            if (part := stored.data[number]) is not None:
                parse_record(part["json"])
    except RepeatedKeyError as error:
        raise SampleError(str(error)) from error
    except (ValueError, RecursionError):
        pass  # which Energon reports
    return load(stored)


def loader_in(dataset: Any) -> WebdatasetSampleLoaderDataset | None:
    """Return the loader of samples inside a dataset; None if there is none."""
    loaders = (each for each in stages_in(dataset) if isinstance(each, _LOADER))
    return next(loaders, None)


def _guard(reader: Any) -> Any:
    if isinstance(reader, IJsonlReader):
        return LineReader(reader)
    return TarReader(reader) if isinstance(reader, ITarReader) else reader


class NumberedSamples:
    """Reads the samples of a dataset from an encoder's ``_load_dataset`` in any order."""

    def __init__(self, dataset: SavableDataset, path: str):
        self.path = path
        *stages, inner = stages_in(guard_readers(dataset))
        for stage, kind in ((inner, _LOADER), *((stage, MapDataset) for stage in stages)):
            if not isinstance(stage, kind):
                raise ConfigError(
                    f"{path}: a {type(stage).__name__} cannot be read by number; write it as JSON "
                    f"Lines."
                )
        #: The functions that it maps over its samples, in order.
        self._stages: list[Callable[[Any], Any]] = [stage.map_fn for stage in reversed(stages)]
        self._readers = inner.join_readers
        self._numbered = [
            each for each in self._readers if isinstance(each, TarReader | LineReader)
        ]

    def read_stored(self, number: int) -> Any:
        """Read a sample as it is stored, for :meth:`cook`; None if the split excludes it."""
        try:
            data = tuple(reader[number] for reader in self._readers)
        except EnergonExtError:
            raise
        except Exception as error:  # Energon raises all kinds of errors for damaged files
            is_join = len(self._readers) > 1
            others = ", or run `energon prepare` on the metadataset with the join" * is_join
            raise ConfigError(
                f"{self.path}: sample {number} cannot be read ({error}); copy its files "
                f"again{others}."
            ) from error
        if data[0] is None:
            return None
        return RawSampleData(__restore_key__=("Webdataset", number), data=data)

    def prefetch(self, number: int) -> None:
        """Ask the operating system or the store to prefetch a sample."""
        for reader in self._numbered:
            reader.prefetch(number)

    def describe_files(self) -> list[FileFacts]:
        """Return the shards and their numbers of samples."""
        shards = [reader.shards for reader in self._numbered if reader.shards is not None]
        return [
            FileFacts(str(info.path), f"{info.count:,} samples")
            for each in shards
            for info in each.infos
        ]

    def stored_bytes(self) -> int:
        """Return the average bytes per sample in an object store; 0 if none is there."""
        shards = [reader.shards for reader in self._numbered]
        return sum(each.sample_bytes() for each in shards if isinstance(each, StoredShards))

    def cook(self, stored: Any) -> Any:
        """Decode and cook a stored sample for the encoder; raises any error of these stages."""
        sample = stored
        for stage in self._stages:
            sample = stage(sample)
        return sample


@contextlib.contextmanager
def as_worker() -> Iterator[None]:
    """Act as the only worker of one rank, since Energon's decorators require a worker."""
    ALONE.worker_activate(0)
    try:
        yield
    finally:
        ALONE.worker_deactivate()


def key_of(stored: Any) -> str:
    """Return the key of a stored sample."""
    return str(stored.data[0]["__key__"])
