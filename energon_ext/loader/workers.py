# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""What :class:`~energon_ext.loader.data_loader.ExactDataLoader` puts around its workers."""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
from multiprocessing import connection, parent_process
from multiprocessing.reduction import ForkingPickler
from signal import SIGBUS, strsignal
from threading import Thread
from typing import Any, Iterator

from megatron.energon.savable_loader import SavableDatasetCheckpoint, SavableDatasetWrapper
from torch._utils import ExceptionWrapper
from torch.utils.data._utils import signal_handling
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from energon_ext.documents.file_set import check_open_files
from energon_ext.errors import EnergonExtError, WorkerError

_FULL = (
    "Shared memory (/dev/shm) is full, or too small for the batches of workers: see `df /dev/shm`, "
    "make it larger (docker: --shm-size=16g), or take num_workers=0."
)


@contextlib.contextmanager
def full_memory_named() -> Iterator[None]:
    """Say where no space is left: batches are in shared memory, and the locks of queues."""
    try:
        yield
    except (OSError, RuntimeError) as error:  # torch raises the latter
        if "No space left" not in str(error):
            raise
        raise WorkerError(_FULL) from error


class _Pickled(bytes):
    """What a worker hands over; unpickled it is that.

    The thread of a queue would print an error and go on, and the trainer wait for ever.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return pickle.loads, (bytes(self),)


def _pickled(batch: Any) -> _Pickled:
    with full_memory_named():
        return _Pickled(ForkingPickler.dumps(batch))  # moves tensors to shared memory


def _end_with(trainer: Any) -> None:
    """torch's watch takes the trainer of a worker that starts late for whoever inherited it."""
    connection.wait([trainer.sentinel])
    os._exit(1)


class ExactWorker(SavableDatasetWrapper):
    """The part of the loader that lives in a worker.

    Attributes:
        save_every: batches of the rank between two saves; 1 where stock's own rule holds.
    """

    save_every: int

    def __iter__(self) -> Iterator[_Pickled]:
        if self._cmd_thread is None:  # the first pass
            Thread(target=_end_with, args=(parent_process(),), daemon=True).start()
        return map(_pickled, super().__iter__())

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

    def get_checkpoint(self, last_sample_indexes: list[int] | None) -> _Pickled:
        """Stock's; None asks after the end of a pass, for the start of the next one."""
        if last_sample_indexes is None:
            found = SavableDatasetCheckpoint(state=self._save_state(), offset=0)
        else:
            found = super().get_checkpoint(last_sample_indexes)
        return _Pickled(pickle.dumps(found))  # without shared memory


class WorkersInTurn(_MultiProcessingDataLoaderIter):
    """Begins a pass with the worker whose turn it is; says what a worker fails or dies of.

    Stock numbers the workers anew instead, and begins every later pass with the same one.
    """

    _skipped_turns: int
    _shutdown = True  # until there is something to shut down

    def __init__(self, loader: Any):
        super().__init__(loader)
        self._unwatch()

    def _unwatch(self) -> None:
        signal_handling._remove_worker_pids(id(self))  # type: ignore[attr-defined]
        self._worker_pids_set = False

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """Raise what a worker dies of while something of it is waited for.

        torch raises from a signal, also where half a message was read and no more comes; but at any
        other time it would raise wherever the trainer is, inside a save for one.
        """
        pids: Any = tuple(worker.pid for worker in self._workers)
        try:
            try:
                if not self._worker_pids_set:
                    self._worker_pids_set = True  # first: torch may raise once it knows them
                    signal_handling._set_worker_pids(id(self), pids)  # type: ignore[attr-defined]
                self._check_alive()
                yield
            finally:
                self._unwatch()
        except (RuntimeError, OSError, EOFError):  # a connection breaks before its worker is gone
            self._check_alive(patience=1.0)
            raise

    def answer(self, answers: Any) -> Any:
        """The next one in a worker's queue of answers; a worker that is dead gives none."""
        with self._watched():
            while True:
                with contextlib.suppress(queue.Empty):
                    return next(iter(answers.get(timeout=1).values()))
                self._check_alive()

    def _next_data(self) -> Any:
        with self._watched():
            return super()._next_data()

    def _check_alive(self, patience: float = 0.0) -> None:
        """Raise what a worker died of; ConfigError where a token file was cut under the run."""
        dead = connection.wait([worker.sentinel for worker in self._workers], patience)
        for worker in self._workers:
            if worker.sentinel in dead:
                worker.join()  # it is waited for a moment after its files are closed
            if code := worker.exitcode:
                check_open_files()
                how = f"is killed by signal: {strsignal(-code)}" if code < 0 else f"ended: {code}"
                why = "Perhaps memory is short: see `dmesg`."
                if code == -SIGBUS:
                    why = f"A file it read was overwritten in place; or: {_FULL}"
                raise WorkerError(f"A data worker (pid {worker.pid}) {how}. {why}")

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
