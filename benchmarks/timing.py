# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Fair timing on a noisy machine, memory of a process, and tables."""

import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path


def microseconds(contenders, calls, rounds=9, clock=time.perf_counter):
    """The best time of each contender, in µs per call.

    Args:
        contenders: ``{name: function(calls)}``; they take turns, so that a slow moment of the
            machine hits all of them.
        calls: calls per round, a number or one for each contender by name.
        rounds: turns.
        clock: seconds; of the processor with ``time.process_time``.
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


def peak_mib():
    """The most memory that this process has had; `ru_maxrss` counts that of its parent as well."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def fresh_process(function, *arguments):
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(function, *arguments).result()


def private_mib(pid):
    """What a process has written and shares with nobody; mapped files are not among it."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Private_Dirty:"):
            return round(int(line.split()[1]) / 1024)
    raise LookupError(f"no Private_Dirty of process {pid}")


def markdown(title, header, rows):
    """A Markdown table under a heading."""
    lines = [f"## {title}", "", "| " + " | ".join(header) + " |"]
    lines.append("| --- " + "| ---: " * (len(header) - 1) + "|")
    lines.extend("| " + " | ".join(map(str, row)) + " |" for row in rows)
    return "\n".join(lines) + "\n"
