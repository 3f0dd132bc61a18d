# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Foreign code in a process of its own, which ends when it takes too long or too much memory."""

import contextlib
import json
import os
import re
import resource
import signal
import threading
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from energon_ext.errors import ConfigError, SampleError
from energon_ext.prepare.pool import end_with_parent

#: Of one call: seconds, bytes of memory, and bytes of the text that it gives.
MOST_SECONDS, MOST_MEMORY, MOST_BYTES = 10.0, 2**30, 2**28


class Limited:
    """A function from JSON values to text, called in another process.

    Each thread that calls it forks one at its first call, which ends with the thread. SampleError
    where the function raises, ConfigError where it meets a limit.
    """

    def __init__(self, function: Callable[..., str], what: str):
        self._function, self._what = function, what
        self._own = threading.local()

    def __call__(self, *arguments: Any) -> str:
        asked = json.dumps(arguments).encode()
        try:
            pipe = self._pipe()
            pipe.send_bytes(asked)
            answer = pipe.recv_bytes(2 * MOST_BYTES) if pipe.poll(MOST_SECONDS) else None
        except (EOFError, OSError):  # it is gone, or says more than may be read
            answer = None
        if answer is None:
            self._end()
            raise ConfigError(
                f"{self._what}: takes more than {MOST_SECONDS:g} seconds, {MOST_MEMORY:,} bytes of "
                f"memory or {MOST_BYTES:,} bytes of text for one sample; take another one."
            )
        text, error = json.loads(answer)
        if error is not None:
            raise SampleError(f"{self._what} refuses it ({error})")
        return text

    def _pipe(self) -> Connection:
        if getattr(self._own, "parent", None) != os.getpid():  # none, or that of our parent
            ours, theirs = Pipe()
            number = os.fork()
            if number == 0:
                _serve(theirs, self._function)
            theirs.close()
            self._own.parent, self._own.number, self._own.pipe = os.getpid(), number, ours
        return self._own.pipe

    def _end(self) -> None:
        with contextlib.suppress(AttributeError, ProcessLookupError, ChildProcessError):
            os.kill(self._own.number, signal.SIGKILL)
            os.waitpid(self._own.number, 0)
        self._own = threading.local()

    def __reduce__(self) -> tuple[Any, ...]:
        return Limited, (self._function, self._what)


def _serve(pipe: Connection, function: Callable[..., str]) -> None:
    """Answer until the other end is closed; nothing that the parent has open stays open here."""
    try:
        end_with_parent()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        held = re.search(r"VmData:\s+(\d+)", Path("/proc/self/status").read_text())
        assert held is not None
        os.closerange(3, pipe.fileno())
        os.closerange(pipe.fileno() + 1, 1 << 16)
        most = (int(held[1]) << 10) + MOST_MEMORY
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
        while True:
            pipe.send_bytes(json.dumps(_called(function, pipe.recv_bytes())).encode())
    finally:
        os._exit(0)


def _called(function: Callable[..., str], asked: bytes) -> tuple[str, str | None]:
    try:
        return function(*json.loads(asked)), None
    except MemoryError:
        raise
    except Exception as error:  # a template may raise anything
        return "", f"{type(error).__name__}: {error!s:.200}"
