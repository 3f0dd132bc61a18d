# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""What crosses from a process of the loader to the trainer: a result, or the error it met.

An error is raised where the result would have been used, in its turn, and with its traceback as the
cause. A result is pickled by the worker itself, since torch's queue would only print an error of
pickling, and the trainer would wait for ever.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import signal
import time
import traceback
from dataclasses import dataclass
from multiprocessing import connection, parent_process
from multiprocessing.reduction import ForkingPickler
from threading import Thread, current_thread, main_thread
from typing import Any, Callable, Iterator

from megatron.energon.wrappers.gc_dataset import gc_init_worker
from torch.utils.data import get_worker_info
from torch.utils.data._utils import signal_handling

from energon_ext.documents.file_set import check_open_files
from energon_ext.errors import WorkerError

_FULL = (
    "Shared memory (/dev/shm) is full, or too small for the batches of workers: see `df /dev/shm`, "
    "make it larger (docker: --shm-size=16g), or take num_workers=0."
)
_PERHAPS = "Perhaps memory is short: see `dmesg`."


class RemoteTraceback(Exception):
    """The traceback of an error in another process; the cause of that error here."""


class Parcel(bytes):
    """A pickled result; unpickled it is that result."""

    def __reduce__(self) -> tuple[Any, ...]:
        return pickle.loads, (bytes(self),)


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
        error = _raisable(error)
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:  # an exception of user code may fail in any way to be pickled
            error = WorkerError(f"{type(error).__name__}: {error}")
        return cls(error, text)

    def throw(self) -> None:
        raise self.error from RemoteTraceback(f"in a process of the loader\n\n{self.traceback}")


def handed_over(work: Callable[[], Any]) -> Any:
    """The result of some work of a worker, or its error, as the trainer can receive it."""
    if get_worker_info() is None:
        try:
            return work()
        except StopIteration as error:
            raise _raisable(error) from error
    try:
        return _packed(work())
    except Exception as error:  # whatever a reader or an encoder raises
        return Failure.of(error)


def _raisable(error: Exception) -> Exception:
    """The error, unless it would end the epoch without a word."""
    if isinstance(error, StopIteration):
        return WorkerError(
            "The TaskEncoder raised StopIteration, as next() does at an end. Catch it there, or "
            "write next(iterator, None)."
        )
    return error


def _packed(result: Any) -> Parcel:
    try:
        with _named():
            return Parcel(ForkingPickler.dumps(result))
    except WorkerError:
        raise
    except Exception as error:  # whatever the objects of a batch raise
        raise WorkerError(
            f"A worker cannot hand over its batch ({type(error).__name__}: {error}). Leave out of "
            f"the batch what cannot be pickled, or take num_workers=0."
        ) from error


@contextlib.contextmanager
def deaths_named(workers: int) -> Iterator[None]:
    """Say what a worker died of, and what to do; also while the trainer does something else.

    Raises:
        WorkerError: one died, or handed over nothing in time.
        ConfigError: a token file was cut under the run.
    """
    if not workers:
        yield
        return
    _name_reported_deaths()
    with _named():
        yield


def _name_reported_deaths() -> None:
    """torch reports a death by an error wherever the trainer is: have it raise ours instead."""
    if current_thread() is not main_thread():
        return  # torch cannot report there
    signal_handling._set_SIGCHLD_handler()
    report = signal.getsignal(signal.SIGCHLD)
    if getattr(report, "func", None) is not _report:
        signal.signal(signal.SIGCHLD, functools.partial(_report, report))


def _report(report: Any, *arguments: Any) -> None:
    with _named():
        report(*arguments)


@contextlib.contextmanager
def _named() -> Iterator[None]:
    """Name the cause of what torch and multiprocessing say of workers and their memory."""
    try:
        yield
    except WorkerError:
        raise
    except (ConnectionError, EOFError) as error:  # while it handed over a tensor
        time.sleep(1.0)  # its death is reported right after that, with its number
        raise WorkerError(f"A data worker died: {error!r}. {_PERHAPS}") from error
    except (OSError, RuntimeError) as error:
        said = " ".join(str(error).split()).rstrip(".")
        if "No space left" in said or "unable to write to file" in said:
            raise WorkerError(_FULL) from error
        if "DataLoader" not in said:
            raise
        if "timed out" in said:
            raise WorkerError(
                f"No batch: {said}. Look at what the data workers wait for (py-spy dump), or give "
                f"the loader a longer timeout."
            ) from error
        check_open_files()
        why = _PERHAPS
        if "bus error" in said.lower():
            why = f"A file it read was overwritten in place; or: {_FULL}"
        raise WorkerError(f"A data worker died: {said}. {why}") from error


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
