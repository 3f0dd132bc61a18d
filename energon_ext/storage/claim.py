# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Lock files that let one process at a time write something, even on a network file system."""

import contextlib
import os
import re
import socket
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from energon_ext.arguments import check_integer
from energon_ext.data_files import read_data
from energon_ext.errors import ConfigError
from energon_ext.storage.whole_file import create, remove_leftovers

#: Without an update for this long, the process with a claim is considered dead.
STALE_SECONDS = 30.0
_BEAT_SECONDS = 3.0
_POLL_SECONDS, _LAST_POLL_SECONDS = 0.2, 5.0

#: How long a process waits for another one to make a file; NCCL collectives time out after 600 s.
WAIT_SECONDS = 480.0

_Made = TypeVar("_Made")
_Unit = TypeVar("_Unit")
_MAX_BYTES = 4096


class ClaimedError(ConfigError):
    """Another process is writing the file or folder."""


class UnwritableError(OSError):
    """A folder cannot be written to."""


@dataclass(frozen=True)
class Part:
    """Every ``count``-th unit, from unit ``number`` on, which is below ``count``."""

    number: int
    count: int

    def __post_init__(self) -> None:
        check_integer("Part.count", self.count, 1)
        check_integer("Part.number", self.number, 0)
        if self.number >= self.count:
            raise ConfigError(
                f"Part.number: {self.number} found, a number below {self.count} is needed; parts "
                f"are counted from 0."
            )

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    def of(self, units: Iterable[_Unit]) -> list[_Unit]:
        """Return the units of this part."""
        return [*units][self.number :: self.count]

    def claimed_path(self, output: Path) -> Path:
        """Return the path that is claimed for this part of an output."""
        return output.with_name(f"{output.name}.{self.number}-of-{self.count}")


@contextlib.contextmanager
def claim(output: Path, wait_seconds: float = 0.0) -> Iterator[Callable[[], None]]:
    """Hold the claim of a file or folder, a file next to it; yield a function that keeps it alive.

    Call the function often; it is cheap. Two processes may find the same claim stale and both take
    it over. They then write the same files under temporary names and rename them, so nothing is
    damaged. ClaimedError if a living process still holds the claim after ``wait_seconds``; OSError
    if the claim cannot be written, and then none is left.
    """
    path, deadline = claim_of(output), time.monotonic() + wait_seconds
    content = f"{_this_machine()} {os.getpid()}".encode()
    while not create(path, content):
        if _is_stale(path):
            path.unlink(missing_ok=True)
        elif time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        else:
            raise ClaimedError(f"{output}: is being prepared by {_owner_of(path)}.")
    next_beat = 0.0

    def beat() -> None:
        nonlocal next_beat
        now = time.monotonic()
        if now >= next_beat:
            next_beat = now + _BEAT_SECONDS
            with contextlib.suppress(FileNotFoundError):  # another process has taken it over
                os.utime(path)

    try:
        yield beat
    finally:
        path.unlink(missing_ok=True)


def make_once(
    file: Path, read: Callable[[], _Made | None], make: Callable[[Callable[[], None]], _Made]
) -> _Made:
    """Return what a file contains; if there is none yet, make it, or wait for another process.

    Args:
        read: reads the file; None if there is none.
        make: makes the file, given a function to call often, and returns its content.

    Raises:
        ConfigError: another process has not finished after ``WAIT_SECONDS``.
        UnwritableError: there is no file, and the folder cannot be written to.
    """

    def read_or_make() -> _Made:
        if (found := read()) is not None:
            return found
        with contextlib.ExitStack() as stack:
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
                beat = stack.enter_context(claim(file))
                remove_leftovers(file, claim_of(file).stat().st_mtime - STALE_SECONDS)
            except OSError as error:
                raise UnwritableError(str(error)) from error
            # Another process may have made it before this one claimed it.
            return make(beat) if (found := read()) is None else found

    return retry_claimed(read_or_make)


def retry_claimed(work: Callable[[], _Made], wait_seconds: float = WAIT_SECONDS) -> _Made:
    """Call a function again and again while another process holds the claim that it needs.

    ConfigError if that process has not finished after ``wait_seconds``.
    """
    deadline, pause = time.monotonic() + wait_seconds, _POLL_SECONDS
    while True:
        try:
            return work()
        except ClaimedError as error:
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"{error} It has not finished in {wait_seconds:.0f} s; wait for it or stop it, "
                    f"then start again."
                ) from error
            time.sleep(pause)
            pause = min(2 * pause, _LAST_POLL_SECONDS)  # thousands of processes may wait


def check_unclaimed(output: Path, part: Part | None) -> None:
    """Raise ClaimedError if another process prepares the whole output or divides it differently."""
    living = living_parts(output)
    others = [path for other, path in living if not part or other.count != part.count]
    if part and (whole := claim_of(output)).exists() and not _is_stale(whole):
        others.append(whole)
    if others:
        raise ClaimedError(f"{output}: is being prepared by {_owner_of(others[0])}.")


def living_parts(output: Path) -> list[tuple[Part, Path]]:
    """Return the parts of an output being prepared, with their claims; remove stale claims."""
    parts = []
    pattern = re.compile(rf"\.{re.escape(output.name)}\.(\d+)-of-(\d+)\.claim")
    for name in os.listdir(output.parent):
        match = pattern.fullmatch(name)
        if match and int(match[1]) < int(match[2]):
            path = output.parent / name
            if _is_stale(path):
                path.unlink(missing_ok=True)
            else:
                parts.append((Part(int(match[1]), int(match[2])), path))
    return parts


def claim_of(output: Path) -> Path:
    """Return the path of the claim of a file or folder."""
    return output.parent / f".{output.name}.claim"


def _this_machine() -> str:
    # Containers on one host may use the same process IDs, each in its own PID namespace.
    return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"


def _owner_in(path: Path) -> tuple[str, str]:
    """Read the machine and the process ID from a claim; empty if not yet written."""
    machine, _, process = read_data(path, _MAX_BYTES).decode("utf-8", "replace").rpartition(" ")
    return machine, process


def _owner_of(path: Path) -> str:
    """Return the process and the host of a claim, for messages."""
    try:
        machine, process = _owner_in(path)
    except OSError:
        machine = ""
    host = machine.partition(" ")[0]
    return f"process {process} on {host}" if host else "another process"


def _is_stale(path: Path) -> bool:
    """Return True if the process that holds a claim is gone."""
    try:
        # The clock of the file system may differ from the clock of this machine.
        with tempfile.NamedTemporaryFile(prefix=".time-", dir=path.parent) as probe:
            age = os.fstat(probe.fileno()).st_mtime - path.stat().st_mtime
        machine, process = _owner_in(path)
    except FileNotFoundError:
        return True
    if age < -STALE_SECONDS:
        # Some clock was wrong. A living process soon sets the time again; a dead one never does.
        with contextlib.suppress(OSError):
            os.utime(path)
    is_gone = machine == _this_machine() and not os.path.exists(f"/proc/{process}")
    return is_gone or age > STALE_SECONDS
