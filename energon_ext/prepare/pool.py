# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Writes the units of a job in worker processes."""

import ctypes
import multiprocessing
import os
import signal
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import FIRST_COMPLETED, CancelledError, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.sharedctypes import RawArray
from pathlib import Path

from energon_ext.errors import WorkerError
from energon_ext.prepare.documents import Unit
from energon_ext.prepare.job import Job, Record, write_unit

_PARENT_DEATH_SIGNAL = 1  # of prctl(2)

#: Writes a unit by number; inherited from the parent, since jobs and inputs cannot be pickled.
_write_by_number: Callable[[int], Record]


def write_units(
    job: Job, units: Mapping[str, Unit], folder: Path, jobs: int, advance: Callable[[int], None]
) -> Generator[tuple[str, Record], None, None]:
    """Write units, and yield the name and record of each one when it is finished.

    With one unit or ``jobs=1``, this process writes the units, and the tokenizer may use all cores.
    ``advance`` is called regularly with the bytes read since its last call.
    """
    workers = min(jobs, len(units))
    if workers <= 1:
        for name, unit in units.items():
            yield name, write_unit(job, unit, name, folder, advance)
        return
    names = list(units)
    # One counter per unit needs no lock, which a killed worker would never release.
    counts, stopped = RawArray("q", len(units)), RawArray("b", 1)

    def write(number: int) -> Record:
        def count(num_bytes: int) -> None:
            counts[number] += num_bytes
            if stopped[0]:
                raise CancelledError

        return write_unit(job, units[names[number]], names[number], folder, count)

    context = multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(workers, context, _start, (write, jobs // workers))
    try:
        pending = {pool.submit(_write, number): name for number, name in enumerate(names)}
        counted = 0
        while pending:
            done, _ = wait(pending, timeout=0.3, return_when=FIRST_COMPLETED)
            total = sum(counts)
            advance(total - counted)
            counted = total
            for future in done:
                yield pending.pop(future), future.result()
    except BrokenProcessPool as error:
        raise WorkerError(
            "A worker was killed, perhaps because it ran out of memory; finished units are kept. "
            "Run the same command again, with fewer --jobs if memory is short."
        ) from error
    finally:
        stopped[0] = 1
        pool.shutdown(cancel_futures=True)


def end_with_parent() -> None:
    """Have this process killed when its parent ends."""
    ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)


def _start(write: Callable[[int], Record], threads: int) -> None:
    """Initialize a worker: end with the parent, ignore Ctrl-C, use only its share of the cores."""
    global _write_by_number
    _write_by_number = write
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["RAYON_NUM_THREADS"] = str(threads)
    if threads == 1:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"


def _write(number: int) -> Record:
    return _write_by_number(number)
