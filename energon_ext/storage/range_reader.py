# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Byte ranges of objects, prefetched by threads."""

import atexit
import contextlib
import math
import os
import queue
import sys
import time
from asyncio import BaseEventLoop
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from threading import Lock, Thread
from typing import Any, TypeVar

import numpy as np

from energon_ext.errors import StoreError, log_of
from energon_ext.storage.object_store import (
    DEADLINE_SECONDS,
    StoredObject,
    find_object,
    read_range,
    replaced_error,
)

logger = log_of(__name__)

#: With more threads, contention outweighs the latency of a store that answers in 30 ms.
READ_REQUESTS = 48

#: Interval at which an object is checked again, in case it was replaced.
_SECONDS_BETWEEN_CHECKS = 600.0

_SECONDS_BETWEEN_LINES = 60.0

#: Longest time that a store that no longer answers delays the exit of a process.
_SECONDS_TO_CLOSE = 20.0

_Result = TypeVar("_Result")

#: A call with the future for its result; None ends a thread.
_Work = tuple[Future[Any], Callable[[], Any]] | None


class RangeReader:
    """Reads byte ranges of objects with threads of this process.

    Args:
        requests: number of threads, and so of concurrent requests.
    """

    def __init__(self, requests: int = READ_REQUESTS):
        self.process = os.getpid()
        self._requests = requests
        self._threads: list[Thread] = []
        self._work: queue.SimpleQueue[_Work] = queue.SimpleQueue()
        self._ranges: dict[tuple[StoredObject, int, int], Future[bytes]] = {}
        self._seen: dict[str, tuple[float, StoredObject]] = {}
        self._lock = Lock()
        self._gets = self._bytes = 0
        self._waited = 0.0
        self._next_line = time.monotonic() + _SECONDS_BETWEEN_LINES

    def prefetch(self, stored: StoredObject, begin: int, size: int) -> None:
        """Start to read a range unless it is already being read."""
        key = (stored, begin, size)
        if size and key not in self._ranges:
            self._ranges[key] = self._submit(lambda: self._read(stored, begin, size))

    def take(self, stored: StoredObject, begin: int, size: int) -> bytes:
        """Return a range of an object.

        Raises:
            StoreError: the range cannot be read in time, or the object was replaced.
        """
        if not size:
            return b""
        self.prefetch(stored, begin, size)
        future = self._ranges.pop((stored, begin, size))
        start = time.monotonic()
        try:
            content = future.result(DEADLINE_SECONDS)
        except StoreError:
            self._ranges.clear()  # other reads failed as well; a resume must repeat them
            raise
        except FutureTimeoutError:
            raise StoreError(
                f"{stored.url}: no answer in {DEADLINE_SECONDS:.0f} seconds to a request for bytes "
                f"{begin} to {begin + size - 1}; check the connection to the store."
            ) from None
        self._count(size, time.monotonic() - start)
        return content

    def run_all(self, calls: Iterable[Callable[[], _Result]]) -> list[_Result]:
        """Run calls that wait for a store in parallel, and return their results."""
        futures = [self._submit(call) for call in calls]
        return [future.result() for future in futures]

    def _submit(self, call: Callable[[], _Result]) -> "Future[_Result]":
        future: Future[_Result] = Future()
        self._work.put((future, call))
        if len(self._threads) < self._requests:
            # Daemons: a process that exits must not wait for the queued requests.
            self._threads.append(Thread(target=self._run_calls, daemon=True))
            self._threads[-1].start()
        return future

    def close(self) -> None:
        """Cancel the queued requests and wait for the open ones.

        Python crashes with a segmentation fault if it exits while a thread is in the Rust client,
        or while a thread of the Rust client is in Python.
        """
        if self.process != os.getpid() or not self._threads:
            return
        with contextlib.suppress(queue.Empty):
            while work := self._work.get_nowait():
                work[0].cancel()
        for _ in self._threads:
            self._work.put(None)
        last = time.monotonic() + _SECONDS_TO_CLOSE
        while time.monotonic() < last:
            if not any(map(_is_alive, self._threads)) and not _is_client_in_python():
                return
            time.sleep(0.001)

    def _run_calls(self) -> None:
        while (work := self._work.get()) is not None:
            future, call = work
            try:
                future.set_result(call())
            except BaseException as error:  # raised where the result is needed
                future.set_exception(error)
            del future, call, work

    def _read(self, stored: StoredObject, begin: int, size: int) -> bytes:
        self._check(stored)
        try:
            return read_range(stored.url, begin, size)
        except FileNotFoundError:
            raise replaced_error(stored, "missing") from None

    def _check(self, stored: StoredObject) -> None:
        """Check from time to time that an object is still the one the plan was made with."""
        with self._lock:
            time_seen, before = self._seen.get(stored.url, (-_SECONDS_BETWEEN_CHECKS, stored))
            if time.monotonic() < time_seen + _SECONDS_BETWEEN_CHECKS:
                return
            self._seen[stored.url] = (time.monotonic(), before)
        try:
            now = find_object(stored.url)
            if now is None or now.size != stored.size:
                raise replaced_error(stored, f"{now.size} bytes" if now else "missing")
            if before.version not in (None, now.version):
                raise replaced_error(stored, f"ETag {now.version}")
        except StoreError:
            self._seen.pop(stored.url, None)
            raise
        self._seen[stored.url] = (time.monotonic(), now)

    def _count(self, size: int, waited: float) -> None:
        self._gets += 1
        self._bytes += size
        self._waited += waited
        if time.monotonic() > self._next_line:
            self._next_line = time.monotonic() + _SECONDS_BETWEEN_LINES
            read = f"{self._gets:,} requests, {self._bytes / 1e6:,.1f} MB, {self._waited:.1f} s"
            logger.info("Object storage: %s waited (process %d)", read, self.process)


def _is_alive(thread: Thread) -> bool:
    """Return True if Linux has the thread; to Python it ends before it has left the Rust client."""
    return os.path.exists(f"/proc/self/task/{thread.native_id}")


def _is_client_in_python() -> bool:
    """Return True if a thread of the Rust client reports a result, after the caller may have it."""
    report = BaseEventLoop.call_soon_threadsafe.__code__
    for frame in sys._current_frames().values():
        while frame.f_back:
            frame = frame.f_back
        if frame.f_code is report:
            return True
    return False


_reader = RangeReader()
atexit.register(lambda: _reader.close())


def range_reader() -> RangeReader:
    """Return the reader of this process; after a fork a new one, as threads do not survive it."""
    global _reader
    if _reader.process != os.getpid():
        _reader = RangeReader(_reader._requests)
    return _reader


def use_requests(requests: int) -> None:
    """Restart the reader with the given number of concurrent requests."""
    global _reader
    _reader.close()
    _reader = RangeReader(requests)


class RemoteTokens:
    """Items of one type and shape in an object, sliced like the map of a local file.

    Args:
        begin: byte of the first item.
        item: shape of an item.
    """

    def __init__(
        self, stored: StoredObject, dtype: np.dtype, begin: int = 0, item: tuple[int, ...] = ()
    ):
        self._stored, self._dtype, self._begin, self._item = stored, dtype, begin, item
        self._item_bytes = math.prod(item) * dtype.itemsize

    def __len__(self) -> int:
        return (self._stored.size - self._begin) // self._item_bytes

    def __getitem__(self, part: slice) -> np.ndarray:
        content = range_reader().take(self._stored, *self._bytes_of(part))
        return np.frombuffer(content, self._dtype).reshape(-1, *self._item)

    def prefetch(self, part: slice) -> None:
        """Start to read a part that is needed soon."""
        range_reader().prefetch(self._stored, *self._bytes_of(part))

    def _bytes_of(self, part: slice) -> tuple[int, int]:
        begin, stop, _ = part.indices(len(self))
        return self._begin + begin * self._item_bytes, max(0, stop - begin) * self._item_bytes
