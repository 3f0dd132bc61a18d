# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Errors and deaths of the loader's processes, as the trainer is told of them.

An error is raised where the result would have been used, in its turn, and with its traceback as the
cause.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import pickle
import signal
import traceback
from dataclasses import dataclass
from multiprocessing import connection, parent_process
from threading import Thread, current_thread, main_thread
from typing import Any, Callable, Iterator

from megatron.energon.wrappers.gc_dataset import gc_init_worker
from torch.utils.data._utils import signal_handling

from energon_ext.documents.file_set import check_open_files
from energon_ext.errors import WorkerError

_PERHAPS = "Perhaps memory is short: see `dmesg`."


class RemoteTraceback(Exception):
    """The traceback of an error in another process; the cause of that error here."""


@dataclass(frozen=True)
class Failure:
    """An error of another process.

    Attributes:
        error: what it raised, or its description where that cannot be pickled.
        traceback: as text.
    """

    error: Exception
    traceback: str

    @classmethod
    def of(cls, error: Exception) -> "Failure":
        text = "".join(traceback.format_exception(error))
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:  # an exception of user code may fail in any way to be pickled
            error = WorkerError(f"{type(error).__name__}: {error}")
        return cls(error, text)

    def throw(self) -> None:
        raise self.error from RemoteTraceback(f"in a process of the loader\n\n{self.traceback}")


@contextlib.contextmanager
def deaths_named(workers: int) -> Iterator[None]:
    """Say what a process of the loader died of; errors of work in place stay as they are.

    Raises:
        WorkerError: one died, or handed over nothing in time.
        ConfigError: a token file was cut under the run.
    """
    try:
        yield
    except WorkerError:
        raise
    except OSError as error:
        if not workers or error.errno != errno.ENOSPC:
            raise
        raise WorkerError(
            "Shared memory (/dev/shm) is full, where the locks of workers are: see `df /dev/shm`, "
            "make room, or take num_workers=0."
        ) from error
    except RuntimeError as error:
        said = " ".join(str(error).split()).rstrip(".")
        if "DataLoader timed out" in said:
            raise WorkerError(
                f"No batch: {said}. Look at what the data workers wait for (py-spy dump), or give "
                f"the loader a longer timeout."
            ) from error
        if "DataLoader worker" not in said:
            raise
        check_open_files()
        why = _PERHAPS
        if "bus error" in said.lower():
            why = "Perhaps a file it read was overwritten in place."
        raise WorkerError(f"A data worker died: {said}. {why}") from error


def name_deaths_anywhere() -> None:
    """Name deaths also while the trainer does something else, where torch's signal handler raises.

    Call it after torch has started the workers. Signals come to the main thread only.
    """
    handler = signal.getsignal(signal.SIGCHLD)
    is_ours = getattr(handler, "func", None) is _handle
    if callable(handler) and not is_ours and current_thread() is main_thread():
        signal.signal(signal.SIGCHLD, functools.partial(_handle, handler))


def _handle(handler: Callable[..., Any], *arguments: Any) -> None:
    with deaths_named(workers=1):
        handler(*arguments)


def end_workers(batches: Any) -> None:
    """End the processes of a DataLoader's iterator at once; torch would wait for each of them."""
    if not hasattr(batches, "_workers"):
        return
    batches._shutdown = True
    signal_handling._remove_worker_pids(id(batches))  # type: ignore[attr-defined]
    batches._worker_pids_set = False
    for worker in batches._workers:
        worker.kill()
        worker.join()


def begin_worker(worker: int) -> None:
    """Prepare a process of the loader, as Energon does; it ends with its trainer."""
    gc_init_worker(worker)
    Thread(target=_end_with, args=(parent_process(),), daemon=True).start()


def _end_with(trainer: Any) -> None:
    """A worker that starts while its trainer is killed would otherwise stay for ever."""
    connection.wait([trainer.sentinel])
    os._exit(1)
