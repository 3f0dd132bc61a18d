# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Reports errors and deaths of the loader's processes to the trainer.

An error is raised in place of the result that it prevented, with its traceback as the cause.
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

from energon_ext.errors import WorkerError, one_line
from energon_ext.tokens.documents import check_open_files


class RemoteTraceback(Exception):
    """The traceback of an error in another process, used as the cause of that error here."""


@dataclass(frozen=True)
class Failure:
    """An error in another process.

    Attributes:
        error: the exception, or a WorkerError with its message if it cannot be pickled.
        traceback: its traceback as text.
    """

    error: Exception
    traceback: str

    @classmethod
    def of(cls, error: Exception) -> "Failure":
        text = "".join(traceback.format_exception(error))
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:  # pickling an exception of user code may fail in any way
            error = WorkerError(f"{type(error).__name__}: {error}")
        return cls(error, text)

    def throw(self) -> None:
        raise self.error from RemoteTraceback(f"in a process of the loader\n\n{self.traceback}")


@contextlib.contextmanager
def explain_deaths(workers: int) -> Iterator[None]:
    """Explain the death of a loader process; errors in this process stay as they are.

    Raises:
        WorkerError: a process died, or did not return a batch in time.
        ConfigError: a token file was truncated during the run.
    """
    try:
        yield
    except GeneratorExit:
        # At exit Python closes generators that still live after it has cleared this module, and so
        # the classes of the clauses below.
        raise
    except WorkerError:
        raise
    except OSError as error:
        if not workers or error.errno != errno.ENOSPC:
            raise
        raise WorkerError(
            "Shared memory (/dev/shm) is full, so workers have no room for their locks; free some "
            "(see `df /dev/shm`), or use num_workers=0."
        ) from error
    except RuntimeError as error:
        reason = one_line(error)
        if "DataLoader timed out" in reason:
            raise WorkerError(
                f"No batch: {reason}. Check what the data workers wait for (py-spy dump), or give "
                f"the loader a longer timeout."
            ) from error
        if "DataLoader worker" not in reason:
            raise
        check_open_files()
        cause = "It may have run out of memory, or a disk cannot be read: see `dmesg`."
        if "bus error" in reason.lower():
            cause = "A file was overwritten in place, or its disk cannot be read: see `dmesg`."
        raise WorkerError(f"A data worker died: {reason}. {cause}") from error


def explain_deaths_in_signals() -> None:
    """Also explain deaths that torch's signal handler raises while the trainer does other work.

    Call it after torch has started the workers. Only the main thread receives signals.
    """
    handler = signal.getsignal(signal.SIGCHLD)
    is_ours = getattr(handler, "func", None) is _handle
    if callable(handler) and not is_ours and current_thread() is main_thread():
        signal.signal(signal.SIGCHLD, functools.partial(_handle, handler))


def _handle(handler: Callable[..., Any], *arguments: Any) -> None:
    with explain_deaths(workers=1):
        handler(*arguments)


def begin_worker(worker: int) -> None:
    """Prepare a process of the loader as Energon does, and let it exit with its trainer."""
    gc_init_worker(worker)
    Thread(target=_exit_with, args=(parent_process(),), daemon=True).start()


def _exit_with(trainer: Any) -> None:
    """Exit when the trainer does; a worker that was starting when it died would stay forever."""
    connection.wait([trainer.sentinel])
    os._exit(1)
