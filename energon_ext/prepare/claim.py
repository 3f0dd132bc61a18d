# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""A file by which one process at a time may write a folder, also on a network file system."""

import contextlib
import os
import socket
import time
from pathlib import Path

#: A claim that nobody touched for so long is of a process that is gone.
STALE_SECONDS = 30.0
_BEAT_SECONDS = 3.0


class Claim:
    """A file that is created by one process alone, and touched while that process works.

    Two processes may both find a claim stale and both take it over. They then write the same files,
    each aside, and rename them, so nothing is damaged.
    """

    def __init__(self, path: Path):
        self.path = path
        self._next_beat = 0.0

    @classmethod
    def take(cls, path: Path) -> "Claim | None":
        """The claim, taken; None where a living process has it."""
        for _ in range(2):
            try:
                file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
            except FileExistsError:
                if not _is_stale(path):
                    return None
                path.unlink(missing_ok=True)
                continue
            with os.fdopen(file, "w") as opened:
                opened.write(_owner())
            return cls(path)
        return None

    def beat(self) -> None:
        """Show that this process works; cheap, to be called often."""
        now = time.monotonic()
        if now >= self._next_beat:
            self._next_beat = now + _BEAT_SECONDS
            with contextlib.suppress(FileNotFoundError):  # another process took it over
                os.utime(self.path)

    def __enter__(self) -> "Claim":
        return self

    def __exit__(self, *error: object) -> None:
        self.path.unlink(missing_ok=True)


def owner_of(path: Path) -> str:
    """Host and process that have a claim, for messages."""
    try:
        host, _, process = path.read_text().split()
        return f"process {process} on {host}"
    except (OSError, ValueError):
        return "another process"


def _owner() -> str:
    # Containers of one host have the same process numbers, each in a name space of its own.
    return f"{socket.gethostname()} {_process_names()} {os.getpid()}"


def _process_names() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return "-"


def _is_stale(path: Path) -> bool:
    """Whether the process that has a claim is gone."""
    try:
        age = _time_of(path.parent) - path.stat().st_mtime
        host, names, process = path.read_text().split()
    except FileNotFoundError:
        return True
    except ValueError:  # not yet written
        return age > STALE_SECONDS
    is_here = (host, names) == (socket.gethostname(), _process_names())
    return age > STALE_SECONDS or (is_here and not os.path.exists(f"/proc/{process}"))


def _time_of(folder: Path) -> float:
    """The time of the file system, whose clock need not be that of this machine."""
    probe = folder / f".time-{socket.gethostname()}-{os.urandom(6).hex()}"
    probe.touch()
    try:
        return probe.stat().st_mtime
    finally:
        probe.unlink()
