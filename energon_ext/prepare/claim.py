# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""A file by which one process at a time may write a folder, also on a network file system."""

import contextlib
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from energon_ext.data_files import read_data
from energon_ext.errors import ConfigError

#: A claim that nobody touched for so long is of a process that is gone.
STALE_SECONDS = 30.0
_BEAT_SECONDS = 3.0
_MOST_BYTES = 4096


class ClaimedError(ConfigError):
    """Another process writes a folder."""


@contextlib.contextmanager
def claimed(folder: Path) -> Iterator[Callable[[], None]]:
    """Have the claim of a folder, a file beside it; gives a function that shows that work goes on.

    It is cheap, and to be called often. Two processes may both find a claim stale and both take it
    over. They then write the same files, each aside, and rename them, so nothing is damaged.

    Raises:
        ClaimedError: a living process has the claim.
    """
    path = folder.parent / f".{folder.name}.claim"
    while not _is_created(path):
        if not _is_stale(path):
            raise ClaimedError(f"{folder}: is being prepared by {_owner_of(path)}.")
        path.unlink(missing_ok=True)
    next_beat = 0.0

    def beat() -> None:
        nonlocal next_beat
        now = time.monotonic()
        if now >= next_beat:
            next_beat = now + _BEAT_SECONDS
            with contextlib.suppress(FileNotFoundError):  # another process took it over
                os.utime(path)

    try:
        yield beat
    finally:
        path.unlink(missing_ok=True)


def _is_created(path: Path) -> bool:
    try:
        with open(path, "x") as file:
            file.write(" ".join([*_this_machine(), str(os.getpid())]))
        return True
    except FileExistsError:
        return False


def _this_machine() -> list[str]:
    # Containers of one host have the same process numbers, each in a name space of its own.
    return [socket.gethostname(), os.readlink("/proc/self/ns/pid")]


def _words(path: Path) -> list[str]:
    return read_data(path, _MOST_BYTES).decode("utf-8", "replace").split()


def _owner_of(path: Path) -> str:
    """Process and host, for messages."""
    try:
        host, _, process = _words(path)
        return f"process {process} on {host}"
    except (OSError, ValueError):
        return "another process"


def _is_stale(path: Path) -> bool:
    """Whether the process that has a claim is gone."""
    try:
        # The clock of a file system need not be that of this machine.
        with tempfile.NamedTemporaryFile(prefix=".time-", dir=path.parent) as probe:
            age = os.fstat(probe.fileno()).st_mtime - path.stat().st_mtime
        owner = _words(path)
    except FileNotFoundError:
        return True
    *machine, process = owner or [""]  # not yet written
    is_gone = machine == _this_machine() and not os.path.exists(f"/proc/{process}")
    return is_gone or age > STALE_SECONDS
