# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""What :class:`~energon_ext.loader.data_loader.ExactDataLoader` puts around its workers."""

from __future__ import annotations

from typing import Any

from megatron.energon.savable_loader import SavableDatasetCheckpoint, SavableDatasetWrapper
from torch._utils import ExceptionWrapper
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from energon_ext.errors import EnergonExtError


class ExactWorker(SavableDatasetWrapper):
    """The part of the loader that lives in a worker.

    Attributes:
        save_every: batches of the rank between two saves; 1 where stock's own rule holds.
    """

    save_every: int

    def _store_checkpoint(self, force: bool = False) -> None:
        # Stock forces one at the end of the data, of a worker that stands before its next pass.
        if not force and self.save_every == 1:
            super()._store_checkpoint()
        elif not force and (self._sample_index <= 1 or self._is_due()):
            super()._store_checkpoint(force=True)

    def _is_due(self) -> bool:
        """Whether a save falls between this worker's last batch and its next one."""
        workers = self.worker_config.num_workers
        next_batch = self._sample_index * workers + self._worker_id
        return bool(next_batch // self.save_every > (next_batch - workers) // self.save_every)

    def get_checkpoint(self, last_sample_indexes: list[int] | None) -> SavableDatasetCheckpoint:
        """Stock's; None asks after the end of a pass, for the start of the next one."""
        if last_sample_indexes is None:
            return SavableDatasetCheckpoint(state=self._save_state(), offset=0)
        return super().get_checkpoint(last_sample_indexes)


class WorkersInTurn(_MultiProcessingDataLoaderIter):
    """Begins a pass with the worker whose turn it is; says errors of workers in their own words.

    Stock numbers the workers anew instead, and begins every later pass with the same one.
    """

    _skipped_turns: int

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        self._skipped_turns = loader._next_worker_id
        super()._reset(loader, first_iter)

    def _try_put_index(self) -> None:
        while self._skipped_turns:
            next(self._worker_queue_idx_cycle)
            self._skipped_turns -= 1
        super()._try_put_index()

    def _process_data(self, data: Any, *worker: Any) -> Any:
        if isinstance(data, ExceptionWrapper) and issubclass(data.exc_type, EnergonExtError):
            # torch makes one message of the whole traceback; ours are one line, and the last.
            message = data.exc_msg.splitlines()[-1].partition(": ")[2]
            raise data.exc_type(message) from RuntimeError(f"{data.where}:\n{data.exc_msg}")
        return super()._process_data(data, *worker)
