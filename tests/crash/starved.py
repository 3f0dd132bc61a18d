# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""A process with its own mounts, where memory is short or a folder is read-only."""

import ctypes
import faulthandler
import os
import resource
import signal
import subprocess
from pathlib import Path

import pytest

from tests.megatron.processes import SERVER, TIMEOUT_SECONDS, write_errors_to

_NEW_MOUNTS, _NEW_USER = 0x20000, 0x10000000


class NoMounts(Exception):
    """This machine does not allow private mounts."""


def mount_for_itself(*arguments):
    """Call ``mount``; the first call also gives the process its own mount namespace."""
    if not _is_alone:
        _leave()
    try:
        subprocess.run(["mount", *map(str, arguments)], check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise NoMounts(getattr(error, "stderr", "") or str(error)) from error


def outcome(work, *arguments, stderr, is_killed=False):
    """Run ``work(*arguments)`` in a process and return its result; skip if it cannot mount.

    Args:
        is_killed: the process is killed right after the result, before it can stop its children.
    """
    here, there = SERVER.Pipe(duplex=False)
    process = SERVER.Process(target=_call, args=(work, arguments, there, str(stderr), is_killed))
    process.start()
    there.close()
    try:
        if not here.poll(TIMEOUT_SECONDS):
            pytest.fail(f"it hangs\n{Path(stderr).read_text()}")
        found = here.recv()
        process.join(TIMEOUT_SECONDS)
        assert process.exitcode == (-signal.SIGKILL if is_killed else 0)
    except EOFError:
        pytest.fail(Path(stderr).read_text())
    finally:
        process.kill()
        process.join()
    if isinstance(found, NoMounts):
        pytest.skip(f"no private mounts: {found}")
    return found


def said(call, *arguments):
    """Return the type and message of the exception that a call raises."""
    with pytest.raises(Exception) as raised:  # noqa: PT011
        call(*arguments)
    return f"{type(raised.value).__name__}: {raised.value}"


def _call(work, arguments, pipe, stderr, is_killed):
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    write_errors_to(stderr)
    faulthandler.dump_traceback_later(TIMEOUT_SECONDS - 10)
    try:
        found = work(*arguments)
    except NoMounts as error:
        found = error
    pipe.send(found)
    if is_killed:
        os.kill(os.getpid(), signal.SIGKILL)


_is_alone = False


def _leave():
    """Enter a new mount namespace, as root or as the root of a user namespace."""
    global _is_alone
    user, group = os.getuid(), os.getgid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEW_MOUNTS):
        if libc.unshare(_NEW_MOUNTS | _NEW_USER):
            raise NoMounts(os.strerror(ctypes.get_errno()))
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    _is_alone = True
    mount_for_itself("--make-rprivate", "/")
