# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Objects in a store, accessed with the multi-storage client that Energon depends on.

Credentials, retries and a disk cache are configured in the client. Small files are copied once per
node to a local folder.
"""

import errno
import itertools
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import multistorageclient as msc
from megatron.energon.epathlib import EPath
from multistorageclient.types import Range

from energon_ext.compat import (
    attempts_of,
    cached_clients,
    drop_rust_client,
    has_rust_client,
    url_of_data_service,
)
from energon_ext.data_files import CACHE_VARIABLE
from energon_ext.errors import ConfigError, StoreError, one_line
from energon_ext.keyed import sha256
from energon_ext.storage.claim import ClaimedError, claim
from energon_ext.storage.whole_file import open_whole

_Result = TypeVar("_Result")

DEADLINE_SECONDS = 120.0

#: Most objects below a folder.
MAX_OBJECTS = 1_000_000


@dataclass(frozen=True)
class StoredObject:
    """An object or a local file, as it was when the source was opened."""

    url: str
    size: int
    version: str | int | None = None  # ETag of an object, modification time of a file
    sha256: str | None = None  # of the content

    def __str__(self) -> str:
        return self.url


def is_remote(path: object) -> bool:
    """True if a path is in an object store: ``msc://`` or ``s3://``."""
    return str(path).startswith(("msc://", "s3://"))


def file_name(path: str | Path | EPath) -> str:
    """Return the name by which a path is opened: of a local file, or an ``msc://`` URL.

    The text of an EPath may be neither: ``dss://NAME@VERSION/...`` stands for a folder below
    NVDATASET_CACHE_DIR, and the profile of an ``msc://`` URL for a local folder.
    """
    text = str(path)
    if not isinstance(path, EPath):
        if not text.startswith("dss://"):
            return text
        path = EPath(text)
    elif text.startswith("/"):
        return text
    if path.is_local():
        return str(path.local_path())
    if path.profile == "dss":
        return url_of_data_service(path)
    return text


def as_msc(path: Any) -> Any:
    """Convert an ``s3://`` path to the client's ``msc://``; ValueError if it contains a login."""
    if not str(path).startswith("s3://"):
        return path
    if "@" in urlsplit(str(path)).netloc:
        raise ValueError("a path must not contain a login")
    client, key = _client(str(path))
    return f"msc://{client.profile}/{key}"


def _client(url: str) -> tuple[Any, str]:
    """Return the client of an object and its key there; clients are cached per process."""
    try:
        client, key = msc.resolve_storage_client(url)
        _use_in_this_process(client)
        return client, key
    except ImportError as error:
        raise ConfigError(
            f"{url}: the client for this store is not installed ({error}); install "
            f"`megatron-energon[s3]`, or the extra for your store."
        ) from error
    except (ValueError, RuntimeError) as error:
        raise ConfigError(f"{url}: no such store ({one_line(error)}).") from error


#: Clients at the time of a fork, by id.
_clients_before_fork: dict[int, Any] = {}


def _keep_clients() -> None:
    """Keep the clients of this process, so that a fork does not destroy them.

    A Rust client that is destroyed closes its connections, for which it needs a lock of its
    threads. If a thread held the lock at the time of the fork, the fork would wait forever, even
    before it runs any code of its own.
    """
    _clients_before_fork.update((id(client), client) for client in cached_clients())


os.register_at_fork(before=_keep_clients)

#: The process that uses the Rust client, if any.
_process_of_rust: int | None = None


def _use_in_this_process(client: Any) -> None:
    """Make a client use boto3 in a fork of a process that uses its Rust client.

    The threads of the Rust client do not survive a fork, so its requests would never be answered.
    """
    global _process_of_rust
    if not has_rust_client(client):
        return
    if _process_of_rust is None:
        _process_of_rust = os.getpid()
    if _process_of_rust != os.getpid():
        drop_rust_client(client)


def ask(url: str, question: Callable[[Any, str], _Result]) -> _Result | None:
    """Ask a store; None if the object does not exist, StoreError for any other client error."""
    client, key = _client(url)
    try:
        return question(client, key)
    except FileNotFoundError:
        return None
    except Exception as error:  # each kind of store has its own error types
        raise StoreError(
            f"{url}: cannot be read after up to {attempts_of(client)} attempts ({one_line(error)})."
        ) from error


def find_object(url: str) -> StoredObject | None:
    """Return the current size and version of an object; None if there is none."""
    found = ask(url, lambda client, key: client.info(key))
    if found is None or found.type != "file":
        return None
    return StoredObject(url, found.content_length, _unquote(found.etag))


def file_at(path: str) -> StoredObject:
    """Like :func:`find_object`, also for a local file; FileNotFoundError if there is none."""
    if not is_remote(path):
        local = os.stat(path)
        return StoredObject(path, local.st_size, local.st_mtime_ns)
    found = find_object(path)
    if found is None:
        raise _missing(path)
    return found


def _missing(path: str) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)


def _unquote(etag: str | None) -> str | None:
    # The Rust client quotes ETags when it lists objects, but not when it looks one up.
    return etag and etag.strip('"')


def objects_below(folder: str) -> Iterable[StoredObject]:
    """Return the objects in a folder and its subfolders; ConfigError if there are too many."""
    profile = folder.split("/")[2]

    def list_objects(client: Any, key: str) -> list[StoredObject]:
        urls = ((f"msc://{profile}/{each.key.lstrip('/')}", each) for each in _below(client, key))
        listed = itertools.islice(urls, MAX_OBJECTS + 1)
        return [StoredObject(url, o.content_length, _unquote(o.etag)) for url, o in listed]

    found = ask(folder, list_objects) or []
    if len(found) > MAX_OBJECTS:
        raise ConfigError(f"{folder}: has more than {MAX_OBJECTS:,} objects below it.")
    return found


def has_below(folder: str, ending: str) -> bool:
    """True if the name of any object below a folder has an ending; lists up to the first one."""

    def found(client: Any, key: str) -> bool:
        return any(each.key.endswith(ending) for each in _below(client, key))

    return bool(ask(folder, found))


def _below(client: Any, key: str) -> Iterable[Any]:
    return client.list_recursive(path=key.rstrip("/") + "/")


def read_object(url: str) -> bytes | None:
    """Read an object; None if there is none."""
    return ask(url, _read)


def read_range(url: str, begin: int, size: int) -> bytes:
    """Read a part of an object; StoreError if the object is shorter."""
    content = ask(url, lambda client, key: _read(client, key, Range(begin, size)))
    if content is None:
        raise _missing(url)
    if len(content) != size:
        raise StoreError(
            f"{url}: got {len(content)} of {size} bytes at {begin}; check that the object is whole."
        )
    return content


def _read(client: Any, key: str, byte_range: Range | None = None) -> bytes:
    return bytes(client.read(key, byte_range))  # the Rust client returns a buffer


# Copies -----------------------------------------------------------------------------------------


def local_copy(stored: StoredObject) -> str:
    """Return the path of a copy on this node; copy the object if there is none yet.

    Its name is a hash of the content, or of URL, size and version. A process waits while another
    one copies; after a timeout it copies by itself.
    """
    known = stored.sha256 or f"{stored.url}\n{stored.size}\n{stored.version}"
    name = stored.sha256 or sha256(known)
    path = Path(_folder_of_copies(), name)
    if not path.exists():
        try:
            with claim(path, wait_seconds=DEADLINE_SECONDS):
                if not path.exists():
                    _copy(stored, path)
        except ClaimedError:
            _copy(stored, path)
    return str(path)


def _copy(stored: StoredObject, path: Path) -> None:
    """Copy an object under another name, and rename the copy."""
    content = read_object(stored.url)
    if content is None or len(content) != stored.size:
        raise replaced_error(stored, "missing" if content is None else f"{len(content)} bytes")
    if stored.sha256 not in (None, sha256(content)):
        raise replaced_error(stored, "different content")
    with open_whole(path) as file:
        file.write(content)


def _folder_of_copies() -> str:
    """Return the local folder of copies; create it if there is none yet."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    cache = os.environ.get(CACHE_VARIABLE) or os.path.join(home, "energon_ext")
    folder = os.path.join(cache, "objects")
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{folder}: cannot be created ({error.strerror}); set {CACHE_VARIABLE} to a folder."
        ) from error
    return folder


def replaced_error(stored: StoredObject, found: str) -> StoreError:
    return StoreError(
        f"{stored.url}: {found}, but the plan was made with an object of {stored.size} bytes; it "
        f"changed during the run. Restore it, or start a new run."
    )
