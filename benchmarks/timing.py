# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Fair timing on a noisy machine, process memory, and tables."""

import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path


def microseconds(contenders, calls, rounds=9, clock=time.perf_counter):
    """Return the best time of each contender, in µs per call.

    Args:
        contenders: ``{name: function(calls)}``; they take turns, so that a slow moment of the
            machine affects all of them.
        calls: calls per round, as a number for all or by contender.
        rounds: number of turns.
        clock: a function that returns seconds, such as ``time.process_time`` for processor time.
    """
    if not isinstance(calls, dict):
        calls = dict.fromkeys(contenders, calls)
    best = dict.fromkeys(contenders, float("inf"))
    for _ in range(rounds):
        for name, function in contenders.items():
            begin = clock()
            function(calls[name])
            best[name] = min(best[name], (clock() - begin) / calls[name] * 1e6)
    return best


def draw(iterator, batches):
    for _ in range(batches):
        next(iterator)


def bytes_of(batch):
    """Return the bytes of all tensors of a batch as one NumPy array."""
    from energon_ext.batch.host_memory import buffer_of
    from energon_ext.batch.transport import tensors_of, values_of

    return buffer_of(tensors_of(values_of(batch))).numpy()


def peak_mib():
    """Return the peak memory of this process; `ru_maxrss` would include its parent's."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def fresh_process(function, *arguments):
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(function, *arguments).result()


def private_mib(pid):
    """Return the private memory that a process has written, without mapped files."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Private_Dirty:"):
            return round(int(line.split()[1]) / 1024)
    raise LookupError(f"no Private_Dirty of process {pid}")


def markdown(title, header, rows):
    """Return a Markdown table under a heading."""
    lines = [f"## {title}", "", "| " + " | ".join(header) + " |"]
    lines.append("| --- " + "| ---: " * (len(header) - 1) + "|")
    lines.extend("| " + " | ".join(map(str, row)) + " |" for row in rows)
    return "\n".join(lines) + "\n"
