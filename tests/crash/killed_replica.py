# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Runs examples/14_lost_rank.py as the replica that dies, that returns, or that goes on.

    python -m tests.crash.killed_replica dies|returns|waits FOLDER SCRIPT OPTIONS...

All four begin together. Those that go on wait in a late step until the lost one is back.
"""

import itertools
import os
import runpy
import signal
import sys
import time
from pathlib import Path

import energon_ext
import energon_ext.megatron
from tests.megatron.processes import TIMEOUT_SECONDS

RANKS, DIES_AT, WAITS_AT = 4, 8, 30  # replicas, and batches of this one

role, folder, script, *options = sys.argv[1:]
calls, forward = itertools.count(1), energon_ext.megatron.forward_step


def wait_for(count, pattern):
    until = time.monotonic() + TIMEOUT_SECONDS
    while len([*Path(folder).glob(pattern)]) < count:
        if time.monotonic() > until:
            sys.exit(f"waited in vain for {count} files {pattern}")
        time.sleep(0.05)


def forward_step(*arguments):
    call = next(calls)
    if role == "dies" and call == DIES_AT:
        os.kill(os.getpid(), signal.SIGKILL)
    if role == "waits" and call >= WAITS_AT:
        wait_for(1, "returns-*")
        time.sleep(0.5)  # it still has to join
    return forward(*arguments)


class Loader(energon_ext.ExactDataLoader):
    def __init__(self, dataset):
        super().__init__(dataset)
        Path(folder, f"{role}-{os.getpid()}").touch()
        if role != "returns":
            wait_for(RANKS, "*-*")


energon_ext.megatron.forward_step = forward_step
energon_ext.ExactDataLoader = Loader
sys.argv = [script, *options]
sys.path.insert(0, str(Path(script).parent))  # as Python does: scripts import their neighbours
runpy.run_path(script, run_name="__main__")
