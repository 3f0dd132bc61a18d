# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Untrusted code in its own process, which is killed if it takes too long or too much memory."""

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

#: Limits of one call: seconds, bytes of memory, and bytes of returned text.
MAX_SECONDS, MAX_MEMORY, MAX_BYTES = 10.0, 2**30, 2**28


class Limited:
    """A function from JSON values to text, called in another process.

    Each calling thread forks a process on its first call; the process ends with the thread. A call
    raises SampleError if the function raises, ConfigError if it exceeds a limit.
    """

    def __init__(self, function: Callable[..., str], what: str):
        self._function, self._what = function, what
        self._process = threading.local()

    def __call__(self, *arguments: Any) -> str:
        request = json.dumps(arguments).encode()
        try:
            pipe = self._pipe()
            pipe.send_bytes(request)
            answer = pipe.recv_bytes(2 * MAX_BYTES) if pipe.poll(MAX_SECONDS) else None
        except (EOFError, OSError):  # the process died, or its answer is too long
            answer = None
        if answer is None:
            self._kill()
            raise ConfigError(
                f"{self._what}: takes more than {MAX_SECONDS:g} seconds, {MAX_MEMORY:,} bytes of "
                f"memory or {MAX_BYTES:,} bytes of text for one sample; use a different one."
            )
        text, error = json.loads(answer)
        if error is not None:
            raise SampleError(f"{self._what} rejects it ({error})")
        return text

    def _pipe(self) -> Connection:
        if getattr(self._process, "parent", None) != os.getpid():  # none yet, or our parent's
            ours, theirs = Pipe()
            pid = os.fork()
            if pid == 0:
                _serve(theirs, self._function)
            theirs.close()
            self._process.parent, self._process.pid, self._process.pipe = os.getpid(), pid, ours
        return self._process.pipe

    def _kill(self) -> None:
        with contextlib.suppress(AttributeError, ProcessLookupError, ChildProcessError):
            os.kill(self._process.pid, signal.SIGKILL)
            os.waitpid(self._process.pid, 0)
        self._process = threading.local()

    def __reduce__(self) -> tuple[Any, ...]:
        return Limited, (self._function, self._what)


def _serve(pipe: Connection, function: Callable[..., str]) -> None:
    """Answer requests until the other end is closed; close all other inherited descriptors."""
    try:
        end_with_parent()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        used_kib = re.search(r"VmData:\s+(\d+)", Path("/proc/self/status").read_text())
        assert used_kib is not None
        os.closerange(3, pipe.fileno())
        os.closerange(pipe.fileno() + 1, 1 << 16)
        limit = (int(used_kib[1]) << 10) + MAX_MEMORY
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        while True:
            pipe.send_bytes(json.dumps(_call(function, pipe.recv_bytes())).encode())
    finally:
        os._exit(0)


def _call(function: Callable[..., str], request: bytes) -> tuple[str, str | None]:
    try:
        return function(*json.loads(request)), None
    except MemoryError:
        raise
    except Exception as error:  # a template may raise anything
        return "", f"{type(error).__name__}: {error!s:.200}"
