# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""One writer for a folder, among all processes and hosts that share its file system.

The lock is ``fcntl.flock`` on a file in the folder, so it ends with its process, however that
ends. The file itself stays; it says who holds the lock, or held it last.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from pathlib import Path
from typing import IO, Iterator

from energon_ext.errors import ConfigError

_held_locks: set[IO[str]] = set()


def _close_inherited_locks() -> None:
    for lock in _held_locks:
        lock.close()


# A forked data worker shares its parent's lock, and would hold it after the parent was killed.
os.register_at_fork(after_in_child=_close_inherited_locks)


@contextlib.contextmanager
def writer_lock(folder: Path) -> Iterator[None]:
    """Hold the folder's lock; the folder is made if need be.

    Raises:
        ConfigError: another process holds it (the message says which), or the folder cannot be
            written, or has no locks.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> with writer_lock(folder), writer_lock(folder):  # doctest: +ELLIPSIS
        ...     pass
        Traceback (most recent call last):
        energon_ext.errors.ConfigError: ... is being written by pid ... on host ...
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / "writer.lock", "a+")  # noqa: SIM115
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error}. Choose another folder.") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            lock.seek(0)
            raise ConfigError(
                f"{folder} is being written by {lock.read() or 'another process'}. "
                "Stop that one, or choose another folder."
            ) from error
        except OSError as error:
            raise ConfigError(
                f"{folder} is on a file system without locks: {error}. Choose another folder."
            ) from error
        _held_locks.add(lock)
        try:
            lock.truncate(0)
            lock.write(f"pid {os.getpid()} on host {socket.gethostname()}")
            lock.flush()
            yield
        finally:
            _held_locks.discard(lock)
