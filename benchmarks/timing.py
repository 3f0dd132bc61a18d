# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Fair timing on a noisy machine, profiles, and tables."""

import cProfile
import io
import pstats
import time


def microseconds(contenders, calls, rounds=7):
    """The best time of each contender, in µs per call.

    Args:
        contenders: ``{name: function(calls)}``; they take turns, so that a slow moment of the
            machine hits all of them.
        calls: calls per round.
        rounds: turns.
    """
    best = dict.fromkeys(contenders, float("inf"))
    for _ in range(rounds):
        for name, function in contenders.items():
            begin = time.perf_counter()
            function(calls)
            best[name] = min(best[name], (time.perf_counter() - begin) / calls * 1e6)
    return best


def profiled(function, lines=8, sort="tottime"):
    """Where the time of one call goes: the functions that take most, as a block of text."""
    profile = cProfile.Profile()
    profile.runcall(function)
    text = io.StringIO()
    pstats.Stats(profile, stream=text).strip_dirs().sort_stats(sort).print_stats(lines)
    kept = [line for line in text.getvalue().splitlines() if line.strip()]
    start = next(number for number, line in enumerate(kept) if "ncalls" in line)
    return "\n```text\n" + "\n".join(kept[start:]) + "\n```\n"


def markdown(title, header, rows):
    """A Markdown table under a heading."""
    lines = [f"## {title}", "", "| " + " | ".join(header) + " |"]
    lines.append("| --- " + "| ---: " * (len(header) - 1) + "|")
    lines.extend("| " + " | ".join(map(str, row)) + " |" for row in rows)
    return "\n".join(lines) + "\n"
