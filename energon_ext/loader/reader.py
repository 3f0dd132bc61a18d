# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Turns descriptions of rows into a batch, in the trainer or in a process of the loader."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.energon import WorkerConfig
from megatron.energon.cache import NoCachePool
from torch.utils.data import Dataset, get_worker_info

from energon_ext.batch.packed_batch import PackedBatch
from energon_ext.batch.transport import page_lock
from energon_ext.compat import set_worker
from energon_ext.errors import ConfigError
from energon_ext.loader.processes import Failure
from energon_ext.loader.slots import Slots
from energon_ext.losses.sources import weigh_sources
from energon_ext.plan.progress import DescribedBatch, DescribedRow
from energon_ext.plan.source import Reader

#: Number and description of a batch, and rows of later batches for the same reader to prefetch.
Item = tuple[int, DescribedBatch | Failure, list[DescribedRow]]


@dataclass(frozen=True)
class BatchReader:
    """Reads the rows of batches and makes batches of them.

    Attributes:
        readers: one per source, in the order of their keys.
        assemble: makes a batch of rows, given how they were described.
        padding: makes a row that counts as nothing, to complete the last step, given the number of
            a source and a function that reads one of its rows; None if an incomplete last step is
            dropped.
        parts: keys that the rows of each source may have in batches; empty if no source has a
            weight in the loss.
    """

    readers: Sequence[Reader]
    assemble: Callable[[list[Any], DescribedBatch], Any]
    padding: Callable[[int, Callable[[], Any]], Any] | None
    parts: Sequence[Sequence[str]] = ()

    def read(self, described: DescribedBatch) -> Any:
        """Read rows, those of one source together, and build a batch from them."""
        rows = described.rows
        by_source = self._by_source(rows)
        for source, (_, descriptions) in by_source.items():
            self.readers[source].prefetch(descriptions)
        found: list[Any] = [None] * len(rows)
        for source, (places, descriptions) in by_source.items():
            for place, row in zip(places, self.readers[source].read(descriptions)):
                found[place] = row
        for place, (source, description, is_padding, _) in enumerate(rows):
            if is_padding:
                assert self.padding is not None, "an incomplete step is dropped without padding"
                read = functools.partial(self.read_row, source, description)
                found[place] = self.padding(source, read)
        return self._weigh(self.assemble(found, described), rows)

    def _weigh(self, batch: Any, rows: Sequence[DescribedRow]) -> Any:
        """Return the batch with the weights of its sources in the loss."""
        if not self.parts:
            return batch
        if not isinstance(batch, PackedBatch):
            raise ConfigError(
                f"loss_weight: a source has one, but the encoder makes batches of type "
                f"{type(batch).__name__}, whose weights are unknown; return a PackedBatch, or "
                f"remove it."
            )
        # All batches of a run have the same columns, also those without such a source.
        weights = {source: weight for source, _, _, weight in rows if weight is not None}
        return weigh_sources(
            batch, {key: each for source, each in weights.items() for key in self.parts[source]}
        )

    def read_row(self, source: int, description: Any) -> Any:
        """Read one row of a source, given by its number."""
        return self.readers[source].read([description])[0]

    def prefetch(self, rows: Sequence[DescribedRow]) -> None:
        """Ask the storage to prefetch rows."""
        for source, (_, descriptions) in self._by_source(rows).items():
            self.readers[source].prefetch(descriptions)

    @staticmethod
    def _by_source(rows: Sequence[DescribedRow]) -> dict[int, tuple[list[int], list[Any]]]:
        """Return the places and the descriptions of the rows of each source, without padding."""
        found: dict[int, tuple[list[int], list[Any]]] = {}
        for place, (source, description, is_padding, _) in enumerate(rows):
            if not is_padding:
                places, descriptions = found.setdefault(source, ([], []))
                places.append(place)
                descriptions.append(description)
        return found


class RoundReader(Dataset[Any]):
    """Turns rounds of described rows into batches; needs no plan and has no state."""

    def __init__(self, batches: BatchReader, worker_config: WorkerConfig, slots: Slots | None):
        self._batches, self._config, self._slots = batches, worker_config, slots

    def __getitem__(self, item: Item) -> Any:
        number, described, later = item
        if isinstance(described, Failure):
            return described
        if self._slots is None:
            return page_lock(self._read(number, described, later))
        try:
            return self._slots.put(number, self._read(number, described, later))
        except Exception as error:  # an encoder, or pickling its batch, may raise anything
            return Failure.of(error)

    def _read(self, number: int, described: DescribedBatch, later: list[DescribedRow]) -> Any:
        """Read a batch with Energon's worker state set, which decorators of Energon use."""
        config = self._config
        workers = max(1, config.num_workers)
        info = get_worker_info()
        if info is not None:
            set_worker(number, info.id, workers)
        config.worker_activate(number // workers, cache_pool=NoCachePool())
        try:
            if later:
                self._batches.prefetch([*described.rows, *later])
            return self._batches.read(described)
        except StopIteration as error:  # would silently end the pass
            raise RuntimeError("The TaskEncoder raised StopIteration in a batch.") from error
        finally:
            config.worker_deactivate()
