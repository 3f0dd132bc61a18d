# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Objects in a store, by the multi-storage client that Energon brings.

Credentials, retries and a disk cache are the client's own configuration. Small files are copied
once to a folder of the node.
"""

import errno
import hashlib
import os
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import multistorageclient as msc
from multistorageclient.types import Range

from energon_ext.data_files import CACHE_VARIABLE
from energon_ext.errors import ConfigError, StoreError, log_of

logger = log_of(__name__)

_Result = TypeVar("_Result")

DEADLINE_SECONDS = 120.0


@dataclass(frozen=True)
class StoredObject:
    """An object, or a local file, as it was when the source was opened."""

    url: str
    size: int
    version: str | int | None = None  # its ETag, or the time at which the file was written
    sha256: str | None = None  # of its content

    def __str__(self) -> str:
        return self.url


def is_remote(path: object) -> bool:
    """True if a path is in an object store: ``msc://`` or ``s3://``."""
    return str(path).startswith(("msc://", "s3://"))


def as_msc(path: Any) -> Any:
    """A path with ``s3://`` as the client's own ``msc://``; ValueError where a login is in it."""
    if not str(path).startswith("s3://"):
        return path
    if "@" in urlsplit(str(path)).netloc:
        raise ValueError("a login does not belong into a path")
    client, key = _client(str(path))
    return f"msc://{client.profile}/{key}"


def _client(url: str) -> tuple[Any, str]:
    """The client of an object, and its key there; the client keeps one for each process."""
    try:
        client, key = msc.resolve_storage_client(url)
        _use_in_this_process(getattr(client, "_storage_provider", None))
        return client, key
    except ImportError as error:
        raise ConfigError(
            f"{url}: the client of this store is not installed ({error}); install "
            f"`megatron-energon[s3]`, or with the extra of another store."
        ) from error
    except (ValueError, RuntimeError) as error:
        raise ConfigError(f"{url}: no such store ({_one_line(error)}).") from error


#: The process that uses a client in Rust, if one does.
_process_of_rust: int | None = None


def _use_in_this_process(provider: Any) -> None:
    """Let a provider read by boto3 in a fork of a process that uses its client in Rust.

    Threads of that client do not survive a fork, so a request of the fork would never be answered.
    """
    global _process_of_rust
    if getattr(provider, "_rust_client", None) is None:
        return
    if _process_of_rust is None:
        _process_of_rust = os.getpid()
    if _process_of_rust != os.getpid():
        provider._rust_client = None


def ask(url: str, question: Callable[[Any, str], _Result]) -> _Result | None:
    """The answer of a store, None of what it lacks; StoreError for all else its client raises."""
    client, key = _client(url)
    try:
        return question(client, key)
    except FileNotFoundError:
        return None
    except Exception as error:  # each kind of store has its own
        attempts = getattr(getattr(client, "_retry_config", None), "attempts", 1)
        raise StoreError(
            f"{url}: cannot be read in up to {attempts} attempts ({_one_line(error)})."
        ) from error


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__


def find_object(url: str) -> StoredObject | None:
    """An object as it is now; None where there is none."""
    found = ask(url, lambda client, key: client.info(key))
    if found is None or found.type != "file":
        return None
    return StoredObject(url, found.content_length, _unquoted(found.etag))


def file_at(path: str) -> StoredObject:
    """An object, or a local file, as it is now; FileNotFoundError where there is none."""
    if not is_remote(path):
        local = os.stat(path)
        return StoredObject(path, local.st_size, local.st_mtime_ns)
    found = find_object(path)
    if found is None:
        raise _missing(path)
    return found


def _missing(path: str) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)


def _unquoted(etag: str | None) -> str | None:
    # The Rust client lists them with quotation marks and finds them without.
    return etag and etag.strip('"')


def objects_below(folder: str) -> Iterable[StoredObject]:
    """The objects of a folder, and of those in it."""
    profile = folder.split("/")[2]

    def listed(client: Any, key: str) -> list[StoredObject]:
        urls = ((f"msc://{profile}/{each.key.lstrip('/')}", each) for each in _below(client, key))
        return [StoredObject(url, o.content_length, _unquoted(o.etag)) for url, o in urls]

    return ask(folder, listed) or []


def has_below(folder: str, ending: str) -> bool:
    """True if a folder, or one in it, has an object with a name that ends so; lists up to it."""

    def found(client: Any, key: str) -> bool:
        return any(each.key.endswith(ending) for each in _below(client, key))

    return bool(ask(folder, found))


def _below(client: Any, key: str) -> Iterable[Any]:
    return client.list_recursive(path=key.rstrip("/") + "/")


def read_object(url: str) -> bytes | None:
    """The content of an object; None where there is none."""
    return ask(url, _read)


def read_range(url: str, begin: int, size: int) -> bytes:
    """A part of an object; StoreError where it is shorter."""
    content = ask(url, lambda client, key: _read(client, key, Range(begin, size)))
    if content is None:
        raise _missing(url)
    if len(content) != size:
        raise StoreError(
            f"{url}: {len(content)} bytes came of {size} at {begin}; see that the object is whole."
        )
    return content


def _read(client: Any, key: str, byte_range: Range | None = None) -> bytes:
    return bytes(client.read(key, byte_range))  # of the Rust client it is a buffer


# Copies -----------------------------------------------------------------------------------------


def local_copy(stored: StoredObject) -> str:
    """The path of a copy on this node, which is made where there is none.

    Its name is a hash of the content, or of what is known of the object. It is written aside and
    renamed; a process that finds another one at work waits for it, and copies by itself in the end.
    """
    known = stored.sha256 or f"{stored.url}\n{stored.size}\n{stored.version}"
    name = stored.sha256 or hashlib.sha256(known.encode()).hexdigest()
    folder = _folder_of_copies()
    path, claim = f"{folder}/{name}", Path(f"{folder}/{name}.claim")
    if os.path.exists(path):
        return path
    _make(folder)
    end = time.monotonic() + DEADLINE_SECONDS
    while not os.path.exists(path) and not _claimed(claim) and time.monotonic() < end:
        time.sleep(0.05)
    try:
        if os.path.exists(path):
            return path
        content = read_object(stored.url)
        if content is None or len(content) != stored.size:
            raise replaced(stored, "missing" if content is None else f"of {len(content)} bytes")
        if stored.sha256 not in (None, hashlib.sha256(content).hexdigest()):
            raise replaced(stored, "of another content")
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
            file.write(content)
        os.replace(file.name, path)
    finally:
        claim.unlink(missing_ok=True)
    return path


def _folder_of_copies() -> str:
    named = os.environ.get(CACHE_VARIABLE)
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return os.path.join(named or os.path.join(home, "energon_ext"), "objects")


def _make(folder: str) -> None:
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{folder}: cannot be made ({error.strerror}); set {CACHE_VARIABLE} to a folder."
        ) from error


def _claimed(claim: Path) -> bool:
    """True if this process is to make a copy; creating a file is exclusive on NFS too."""
    try:
        os.close(os.open(claim, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        try:
            return time.time() - claim.stat().st_mtime > DEADLINE_SECONDS
        except FileNotFoundError:  # it is done
            return False
    return True


def replaced(stored: StoredObject, found: str) -> StoreError:
    return StoreError(
        f"{stored.url}: {found}, not the object of {stored.size} bytes that was planned with; it "
        f"was replaced under the run. Put it back, or begin again."
    )
