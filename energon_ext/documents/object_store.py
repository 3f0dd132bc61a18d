# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Objects in a store, by the multi-storage client that Energon brings.

Credentials, retries and a disk cache are the client's own configuration. Small files are copied
once to a folder of the node; ranges of large ones are read by threads that begin before a range is
needed.
"""

import hashlib
import os
import queue
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from pathlib import Path
from threading import Lock, Thread
from typing import Any, TypeVar
from urllib.parse import urlsplit

import multistorageclient as msc
import numpy as np
from multistorageclient.types import Range

from energon_ext.data_files import CACHE_VARIABLE
from energon_ext.errors import ConfigError, StoreError, log_of

logger = log_of(__name__)

_Result = TypeVar("_Result")

READ_REQUESTS = 64
DEADLINE_SECONDS = 120.0

#: An object is looked at again after this time, to notice that it was replaced.
_SECONDS_KNOWN = 600.0
_SECONDS_BETWEEN_LINES = 60.0


@dataclass(frozen=True)
class StoredObject:
    """An object as it was when the source was opened.

    Attributes:
        version: its ETag; None where it is not known.
        sha256: of its content; None where it is not known.
    """

    url: str
    size: int
    version: str | None = None
    sha256: str | None = None


def is_remote(path: object) -> bool:
    """Whether a path names something in an object store, as ``msc://`` or ``s3://``."""
    return str(path).startswith(("msc://", "s3://"))


def as_msc(path: Any) -> Any:
    """A path with ``s3://`` as the client's own ``msc://``; any other as it is.

    Raises:
        ValueError: there is a login in it.
    """
    if not str(path).startswith("s3://"):
        return path
    if "@" in urlsplit(str(path)).netloc:
        raise ValueError("a login does not belong into a path")
    client, key = _client(str(path))
    return f"msc://{client.profile}/{key}"


def _client(url: str) -> tuple[Any, str]:
    """The client of an object, and its key there; the client keeps one for each process."""
    try:
        return msc.resolve_storage_client(url)
    except ImportError as error:
        raise ConfigError(
            f"{url}: the client of this store is not installed ({error}); install "
            f"`megatron-energon[s3]`, or with the extra of another store."
        ) from error
    except (ValueError, RuntimeError) as error:
        raise ConfigError(f"{url}: no such store ({_one_line(error)}).") from error


def _ask(url: str, question: Callable[[Any, str], _Result]) -> _Result:
    """The answer of a store; StoreError in place of whatever its client raises."""
    client, key = _client(url)
    try:
        return question(client, key)
    except FileNotFoundError:
        raise
    except Exception as error:  # each kind of store has its own
        config = getattr(client, "_retry_config", None)
        attempts = getattr(config, "attempts", 1)
        raise StoreError(
            f"{url}: cannot be read in up to {attempts} attempts ({_one_line(error)})."
        ) from error


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__


def find_object(url: str) -> StoredObject | None:
    """An object as it is now; None where there is none."""
    try:
        found = _ask(url, lambda client, key: client.info(key))
    except FileNotFoundError:
        return None
    return StoredObject(url, found.content_length, found.etag) if found.type == "file" else None


def objects_below(folder: str) -> Iterable[StoredObject]:
    """The objects of a folder, and of those in it."""
    profile = folder.split("/")[2]

    def listed(client: Any, key: str) -> list[StoredObject]:
        return [
            StoredObject(f"msc://{profile}/{each.key.lstrip('/')}", each.content_length, each.etag)
            for each in client.list_recursive(path=key.rstrip("/") + "/")
        ]

    try:
        return _ask(folder, listed)
    except FileNotFoundError:
        return []


def read_object(url: str) -> bytes | None:
    """The content of an object; None where there is none."""
    try:
        return _ask(url, lambda client, key: client.read(key))
    except FileNotFoundError:
        return None


# Copies -----------------------------------------------------------------------------------------


def local_copy(stored: StoredObject) -> str:
    """The path of a copy on this node, which is made where there is none.

    Its name is a hash of the content, or of what is known of the object. It is written aside and
    renamed; a process that finds another one at work waits for it, and copies by itself in the end.
    """
    known = stored.sha256 or f"{stored.url}\n{stored.size}\n{stored.version}"
    name = stored.sha256 or hashlib.sha256(known.encode()).hexdigest()
    path = _copies() / name
    claim = path.with_suffix(".claim")
    end = time.monotonic() + DEADLINE_SECONDS
    while not path.exists() and not _claimed(claim) and time.monotonic() < end:
        time.sleep(0.05)
    if path.exists():
        return str(path)
    try:
        content = read_object(stored.url)
        if content is None or len(content) != stored.size:
            raise _replaced(stored, "missing" if content is None else f"of {len(content)} bytes")
        if stored.sha256 not in (None, hashlib.sha256(content).hexdigest()):
            raise _replaced(stored, "of another content")
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(content)
        os.replace(file.name, path)
    finally:
        claim.unlink(missing_ok=True)
    return str(path)


def _copies() -> Path:
    named = os.environ.get(CACHE_VARIABLE)
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(named or os.path.join(home, "energon_ext")) / "objects"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{folder}: cannot be made ({error.strerror}); set {CACHE_VARIABLE} to a folder."
        ) from error
    return folder


def _claimed(claim: Path) -> bool:
    """Whether this process is the one to make a copy; making a file is exclusive on NFS too."""
    try:
        os.close(os.open(claim, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        try:
            return time.time() - claim.stat().st_mtime > DEADLINE_SECONDS
        except FileNotFoundError:  # it is done
            return False
    return True


def _replaced(stored: StoredObject, found: str) -> StoreError:
    return StoreError(
        f"{stored.url}: {found}, not the object of {stored.size} bytes that was planned with; it "
        f"was replaced under the run. Put it back, or begin again."
    )


# Ranges -----------------------------------------------------------------------------------------


#: What a thread does and where the result goes; None ends it.
_Work = tuple[Future[Any], Callable[[], Any]] | None


class RangeReader:
    """Reads ranges of objects by threads of this process.

    Args:
        requests: threads, which are as many requests at a time.
    """

    def __init__(self, requests: int = READ_REQUESTS):
        self.process = os.getpid()
        self._requests = requests
        self._started = 0
        self._work: queue.SimpleQueue[_Work] = queue.SimpleQueue()
        self._ranges: dict[tuple[StoredObject, int, int], Future[bytes]] = {}
        self._seen: dict[str, tuple[float, StoredObject]] = {}
        self._lock = Lock()
        self._gets = self._bytes = 0
        self._waited = 0.0
        self._next_line = time.monotonic() + _SECONDS_BETWEEN_LINES

    def expect(self, stored: StoredObject, begin: int, size: int) -> None:
        """Begin to read a range, unless that was begun."""
        key = (stored, begin, size)
        if size and key not in self._ranges:
            self._ranges[key] = self._submit(lambda: self._read(stored, begin, size))

    def take(self, stored: StoredObject, begin: int, size: int) -> bytes:
        """A range of an object.

        Raises:
            StoreError: it cannot be read in time, or the object is not what it was.
        """
        if not size:
            return b""
        self.expect(stored, begin, size)
        future = self._ranges.pop((stored, begin, size))
        start = time.monotonic()
        try:
            content = future.result(DEADLINE_SECONDS)
        except FutureTimeoutError:
            raise StoreError(
                f"{stored.url}: no answer in {DEADLINE_SECONDS:.0f} seconds to a request for bytes "
                f"{begin} to {begin + size - 1}; see that the store can be reached."
            ) from None
        self._count(size, time.monotonic() - start)
        return content

    def run_all(self, calls: Iterable[Callable[[], _Result]]) -> list[_Result]:
        """The results of calls that wait for a store, made beside each other."""
        futures = [self._submit(call) for call in calls]
        return [future.result() for future in futures]

    def _submit(self, call: Callable[[], _Result]) -> "Future[_Result]":
        future: Future[_Result] = Future()
        self._work.put((future, call))
        if self._started < self._requests:
            self._started += 1
            # A process must not wait for a store at its end.
            Thread(target=self._work_on, daemon=True).start()
        return future

    def close(self) -> None:
        """End the threads, each after the request that it is at."""
        if self.process == os.getpid():
            for _ in range(self._started):
                self._work.put(None)

    def _work_on(self) -> None:
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
            content = _ask(stored.url, lambda client, key: client.read(key, Range(begin, size)))
        except FileNotFoundError:
            raise _replaced(stored, "missing") from None
        if len(content) != size:
            raise StoreError(
                f"{stored.url}: {len(content)} bytes came for a request of {size} at {begin}; see "
                f"that the object is whole."
            )
        return content

    def _check(self, stored: StoredObject) -> None:
        """Look now and then whether an object is still the one that was planned with."""
        with self._lock:
            time_seen, before = self._seen.get(stored.url, (-_SECONDS_KNOWN, stored))
            if time.monotonic() < time_seen + _SECONDS_KNOWN:
                return
            self._seen[stored.url] = (time.monotonic(), before)
        try:
            now = find_object(stored.url)
            if now is None or now.size != stored.size:
                raise _replaced(stored, f"of {now.size} bytes" if now else "missing")
            if before.version not in (None, now.version):
                raise _replaced(stored, f"of ETag {now.version}")
        except StoreError:
            self._seen.pop(stored.url, None)
            raise
        self._seen[stored.url] = (time.monotonic(), now)

    def _count(self, size: int, waited: float) -> None:
        self._gets, self._bytes, self._waited = (
            self._gets + 1,
            self._bytes + size,
            self._waited + waited,
        )
        if time.monotonic() > self._next_line:
            self._next_line = time.monotonic() + _SECONDS_BETWEEN_LINES
            logger.info("Object storage: %s", self.counters())

    def counters(self) -> str:
        """What was read so far, for the log."""
        return (
            f"{self._gets:,} requests, {self._bytes / 1e6:,.1f} MB, {self._waited:.1f} s waited "
            f"(process {self.process})"
        )


_reader = RangeReader()


def range_reader() -> RangeReader:
    """The reader of this process; threads do not survive a fork."""
    global _reader
    if _reader.process != os.getpid():
        _reader = RangeReader(_reader._requests)
    return _reader


def use_requests(requests: int) -> None:
    """Begin anew with so many requests at a time."""
    global _reader
    _reader.close()
    _reader = RangeReader(requests)


class RemoteTokens:
    """Numbers of one type in an object, sliced as the map of a local file is."""

    def __init__(self, stored: StoredObject, dtype: np.dtype):
        self._stored, self._dtype = stored, dtype

    def __len__(self) -> int:
        return self._stored.size // self._dtype.itemsize

    def __getitem__(self, part: slice) -> np.ndarray:
        return np.frombuffer(range_reader().take(self._stored, *self._bytes_of(part)), self._dtype)

    def expect(self, part: slice) -> None:
        """Begin to read a part that is asked for soon."""
        range_reader().expect(self._stored, *self._bytes_of(part))

    def _bytes_of(self, part: slice) -> tuple[int, int]:
        begin, stop, _ = part.indices(len(self))
        return begin * self._dtype.itemsize, max(0, stop - begin) * self._dtype.itemsize
