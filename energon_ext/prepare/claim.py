# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""A file by which one process at a time may write a folder, also on a network file system."""

import contextlib
import os
import re
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from energon_ext.data_files import read_data
from energon_ext.errors import ConfigError

#: A claim that nobody touched for so long is of a process that is gone.
STALE_SECONDS = 30.0
_BEAT_SECONDS = 3.0
_LOOK_SECONDS = 0.2
_MOST_BYTES = 4096


class ClaimedError(ConfigError):
    """Another process writes a folder."""


@dataclass(frozen=True)
class Part:
    """Every ``count``-th unit, from unit ``number`` on."""

    number: int
    count: int

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    def beside(self, output: Path) -> Path:
        """Path that is claimed for a part of an output."""
        return output.with_name(f"{output.name}.{self.number}-of-{self.count}")


@contextlib.contextmanager
def claimed(folder: Path, wait_seconds: float = 0.0) -> Iterator[Callable[[], None]]:
    """Have the claim of a folder, a file beside it; gives a function that shows that work goes on.

    It is cheap, and to be called often. Two processes may both find a claim stale and both take it
    over. They then write the same files, each aside, and rename them, so nothing is damaged.
    ClaimedError where a living process still has it after ``wait_seconds``.
    """
    path, deadline = _claim_of(folder), time.monotonic() + wait_seconds
    while not _is_created(path):
        if _is_stale(path):
            path.unlink(missing_ok=True)
        elif time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)
        else:
            raise ClaimedError(f"{folder}: is being prepared by {_owner_of(path)}.")
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


def refuse_others(output: Path, part: Part | None) -> None:
    """ClaimedError where a process makes other parts than those of a division; None for no part."""
    others = [path for each, path in living_parts(output) if not part or each.count != part.count]
    if part and (whole := _claim_of(output)).exists() and not _is_stale(whole):
        others.append(whole)
    if others:
        raise ClaimedError(f"{output}: is being prepared by {_owner_of(others[0])}.")


def living_parts(output: Path) -> list[tuple[Part, Path]]:
    """The parts of an output that are being made, and their claims; removes stale claims."""
    found = []
    of_part = re.compile(rf"\.{re.escape(output.name)}\.(\d+)-of-(\d+)\.claim")
    for name in os.listdir(output.parent):
        if match := of_part.fullmatch(name):
            path = output.parent / name
            if _is_stale(path):
                path.unlink(missing_ok=True)
            else:
                found.append((Part(int(match[1]), int(match[2])), path))
    return found


def _claim_of(folder: Path) -> Path:
    return folder.parent / f".{folder.name}.claim"


def _is_created(path: Path) -> bool:
    try:
        with open(path, "x") as file:
            file.write(f"{_this_machine()} {os.getpid()}")
        return True
    except FileExistsError:
        return False


def _this_machine() -> str:
    # Containers of one host have the same process numbers, each in a name space of its own.
    return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"


def _owner_in(path: Path) -> tuple[str, str]:
    """The machine and the number of the process that has a claim; empty where not yet written."""
    machine, _, process = read_data(path, _MOST_BYTES).decode("utf-8", "replace").rpartition(" ")
    return machine, process


def _owner_of(path: Path) -> str:
    """Process and host, for messages."""
    try:
        machine, process = _owner_in(path)
    except OSError:
        machine = ""
    host = machine.partition(" ")[0]
    return f"process {process} on {host}" if host else "another process"


def _is_stale(path: Path) -> bool:
    """True if the process that has a claim is gone."""
    try:
        # The clock of a file system need not be that of this machine.
        with tempfile.NamedTemporaryFile(prefix=".time-", dir=path.parent) as probe:
            age = os.fstat(probe.fileno()).st_mtime - path.stat().st_mtime
        machine, process = _owner_in(path)
    except FileNotFoundError:
        return True
    is_gone = machine == _this_machine() and not os.path.exists(f"/proc/{process}")
    return is_gone or age > STALE_SECONDS
