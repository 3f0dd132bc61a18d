# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Forks the workers of torch's ``DataLoader`` so that their death at any moment ends every wait.

torch learns of a death from a signal. By itself it waits for the whole timeout, or forever, if

* a worker dies before torch has noted its process;
* batches are not drawn in the main thread, where signals arrive; or
* a worker dies with the lock of the event that asks workers to end, or in the middle of a message.
"""

from __future__ import annotations

import mmap
import os
import time
from multiprocessing import connection, context, queues
from typing import Any

#: Longest time for which a death can go unnoticed.
_SECONDS_BETWEEN_CHECKS = 1.0


class WorkerContext(context.ForkContext):
    """The multiprocessing context of one ``DataLoader``."""

    def __init__(self) -> None:
        super().__init__()
        self._workers: list[context.ForkProcess] = []

    def Process(self, *arguments: Any, **options: Any) -> Any:  # type: ignore[override]
        self._workers.append(context.ForkProcess(*arguments, **options))
        return self._workers[-1]

    def Queue(self, maxsize: int = 0) -> Any:
        return _Queue(maxsize, self, self._workers)

    def Event(self) -> Any:
        return _Event()


class _Event:
    """An event without a lock, which a dying worker would keep."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 1)

    def is_set(self) -> bool:
        return self._memory[0] == 1

    def set(self) -> None:
        self._memory[0] = 1


class _Queue(queues.Queue):  # type: ignore[type-arg]
    """A queue from which a trainer does not wait for a dead worker."""

    def __init__(self, maxsize: int, ctx: Any, workers: list[context.ForkProcess]):
        super().__init__(maxsize, ctx=ctx)
        reader = self._reader  # type: ignore[has-type]
        self._reader = _Reader(os.dup(reader.fileno()), workers)
        reader.close()
        self._reset()  # type: ignore[attr-defined]


class _Reader(connection.Connection):
    """The end of a queue from which messages are received."""

    def __init__(self, descriptor: int, workers: list[context.ForkProcess]):
        super().__init__(descriptor, writable=False)
        self._workers, self._trainer = workers, os.getpid()
        self._first = len(workers)  # those before were of an earlier pass, and have ended

    def _poll(self, timeout: float) -> bool:
        """Return whether a message has begun to arrive in time; False once a worker has ended."""
        last = time.monotonic() + timeout
        while True:
            left = max(0.0, last - time.monotonic())
            if connection.wait([self], min(left, _SECONDS_BETWEEN_CHECKS)):
                return True
            if not left or self._exit_codes():  # torch knows which workers may have ended
                return False

    def _recv(self, size: int, read: Any = None) -> Any:
        return super()._recv(size, self._read)  # type: ignore[misc]

    def _read(self, descriptor: int, size: int) -> bytes:
        while not connection.wait([self], _SECONDS_BETWEEN_CHECKS):
            if any(self._exit_codes()):
                raise EOFError("A worker died in the middle of a message.")
        return os.read(descriptor, size)

    def _exit_codes(self) -> list[int]:
        """Return the exit codes of workers that have ended; a trainer's only, workers have none."""
        if os.getpid() != self._trainer:
            return []
        codes = [worker.exitcode for worker in self._workers[self._first :]]
        return [code for code in codes if code is not None]
