# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Turns descriptions of rows into a batch, in the trainer or in a process of the loader."""

from __future__ import annotations

from typing import Any

from megatron.energon import WorkerConfig
from megatron.energon.cache import NoCachePool
from torch.utils.data import Dataset, get_worker_info

from energon_ext.loader.processes import Failure
from energon_ext.loader.slots import Slots
from energon_ext.plan.dataset import PlannedDataset
from energon_ext.plan.progress import DescribedRow

#: Number and rows of a batch, and rows of later batches for the same reader to prefetch.
Item = tuple[int, list[DescribedRow] | Failure, list[DescribedRow]]


class Reader(Dataset[Any]):
    """Turns described rows into batches; needs no plan and has no state."""

    def __init__(self, dataset: PlannedDataset, slots: Slots | None):
        self._dataset, self._slots = dataset, slots

    def __getitem__(self, item: Item) -> Any:
        number, rows, later = item
        if isinstance(rows, Failure):
            return rows
        if self._slots is None:
            return self._read(number, rows, later)
        try:
            return self._slots.put(number, self._read(number, rows, later))
        except Exception as error:  # an encoder, or pickling its batch, may raise anything
            return Failure.of(error)

    def _read(self, number: int, rows: list[DescribedRow], later: list[DescribedRow]) -> Any:
        """Read a batch with Energon's worker state set, which decorators of Energon use."""
        config = self._dataset.worker_config
        workers = max(1, config.num_workers)
        info = get_worker_info()
        if info is not None:
            WorkerConfig.worker_id_offset = (number - info.id) % workers
        config.worker_activate(number // workers, cache_pool=NoCachePool())
        try:
            if later:
                self._dataset.prefetch([*rows, *later])
            return self._dataset.read(rows)
        except StopIteration as error:  # would silently end the pass
            raise RuntimeError("The TaskEncoder raised StopIteration in a batch.") from error
        finally:
            config.worker_deactivate()
