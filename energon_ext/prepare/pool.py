# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The units of a job in processes of their own, all of the work in them."""

import ctypes
import multiprocessing
import os
import signal
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.sharedctypes import RawArray
from pathlib import Path
from typing import Any

from energon_ext.errors import WorkerError
from energon_ext.prepare.documents import Unit
from energon_ext.prepare.job import Job, write_unit

_PARENT_DEATH_SIGNAL = 1  # of prctl(2)

#: What the workers inherit when they are forked.
_inherited: Any = None


class _Stopped(Exception):
    """The run has ended while a worker was at work."""


class _Shared:
    """What the workers of a run have in common; no lock, which a killed worker would keep."""

    def __init__(self, job: Job, units: Sequence[tuple[str, Unit]], folder: Path):
        self.job, self.units, self.folder = job, units, folder
        self.num_bytes = RawArray("q", len(units))
        self.stopped = RawArray("b", 1)

    def write(self, index: int) -> dict[str, Any]:
        def advance(num_bytes: int) -> None:
            self.num_bytes[index] += num_bytes
            if self.stopped[0]:
                raise _Stopped

        name, unit = self.units[index]
        return write_unit(self.job, unit, name, self.folder, advance)


def write_units(
    job: Job,
    units: Sequence[tuple[str, Unit]],
    folder: Path,
    jobs: int,
    advance: Callable[[int], None],
) -> Generator[tuple[str, dict[str, Any]], None, None]:
    """Write some units, and yield the name and the record of each once it is done.

    One unit, or one job, is written in this process, where the tokenizer may use all cores.

    Args:
        units: with the name of the files of each.
        advance: is called now and then with the bytes that were read since.

    Raises:
        WorkerError: a worker was killed.
    """
    workers = min(jobs, len(units))
    if workers <= 1:
        for name, unit in units:
            yield name, write_unit(job, unit, name, folder, advance)
        return
    global _inherited
    context = multiprocessing.get_context("fork")
    shared = _inherited = _Shared(job, units, folder)
    pool = ProcessPoolExecutor(
        workers, mp_context=context, initializer=_start, initargs=(jobs // workers,)
    )
    try:
        pending = {pool.submit(_write, n): name for n, (name, _) in enumerate(units)}
        seen = 0
        while pending:
            done, _ = wait(pending, timeout=0.3, return_when=FIRST_COMPLETED)
            now = sum(shared.num_bytes)
            advance(now - seen)
            seen = now
            for future in done:
                yield pending.pop(future), future.result()
    except BrokenProcessPool as error:
        raise WorkerError(
            "A worker was killed, perhaps for want of memory; what is finished is kept. Run the "
            "same command again, with fewer --jobs if memory is short."
        ) from error
    finally:
        shared.stopped[0] = 1
        pool.shutdown(cancel_futures=True)
        _inherited = None


def _start(threads: int) -> None:
    """Make a worker end with its parent, leave Ctrl-C to it, and use its share of the cores."""
    ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["RAYON_NUM_THREADS"] = str(threads)
    if threads == 1:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"


def _write(index: int) -> dict[str, Any]:
    return _inherited.write(index)
