# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""New processes that start at once: a server has imported Megatron and forks them."""

import contextlib
import functools
import itertools
import multiprocessing
import os
import runpy
import socket
import sys
import traceback
import warnings

import pytest

#: The server of this process; its imports are fixed when it starts.
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["tests.megatron.imports"])

TIMEOUT_SECONDS = 180


@functools.cache
def _ports(process):
    """Return an iterator over ports, which begins at another one in each process of a suite."""
    return itertools.chain(range(10_000 + process * 97 % 20_000, 32_000), range(10_000, 32_000))


def start(target, arguments, stderr):
    """Start a process with one torch thread that writes its standard error to a file."""
    process = SERVER.Process(target=_call, args=(target, arguments, str(stderr)))
    process.start()
    return process


def finish(processes, seconds=TIMEOUT_SECONDS):
    """Return exit codes; a process that hangs is killed and fails the test."""
    for process in processes:
        process.join(seconds)
    hanging = [process for process in processes if process.is_alive()]
    for process in hanging:
        process.kill()
        process.join()
    if hanging:
        pytest.fail(f"{len(hanging)} of {len(processes)} processes hung")
    return [process.exitcode for process in processes]


def start_script(path, arguments, stderr, ranks=1):
    """Start ``python path arguments``, or as many ranks as with torchrun."""
    port = free_port()
    environments = [{}]
    if ranks > 1:
        environments = [
            {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            for rank in range(ranks)
        ]
    return [
        start(_run_script, (str(path), [str(argument) for argument in arguments], environment), to)
        for environment, to in zip(environments, _stderr_of_ranks(stderr, ranks))
    ]


def _stderr_of_ranks(stderr, ranks):
    return [stderr, *(f"{stderr}.{rank}" for rank in range(1, ranks))]


def _run_script(path, arguments, environment):
    os.environ.update(environment)
    sys.argv = [path, *arguments]
    sys.path.insert(0, os.path.dirname(path))  # as Python does: scripts import their neighbours
    runpy.run_path(path, run_name="__main__")


def _call(target, arguments, stderr):
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    write_errors_to(stderr)
    try:
        target(*arguments)
    except Exception:
        traceback.print_exc()
        sys.exit(70)


def write_errors_to(path):
    """Send the standard error of this process, and of those that it starts, to a file."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 2)
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115


def free_port():
    """Return a free port below those that the system assigns to connections."""
    for port in _ports(os.getpid()):
        with contextlib.closing(socket.socket()) as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port
    raise OSError("no port is free")
