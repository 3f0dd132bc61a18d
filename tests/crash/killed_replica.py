# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Runs examples/14_lost_rank.py as the replica that dies, that returns, or that goes on.

    python -m tests.crash.killed_replica dies|returns|waits FILE SCRIPT OPTIONS...

One that returns writes FILE when its data is open; those that go on wait for it in a late step.
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

DIES_AT, WAITS_AT = 8, 30  # batches of this replica

role, back, script, *options = sys.argv[1:]
calls, forward = itertools.count(1), energon_ext.megatron.forward_step


def forward_step(*arguments):
    call, until = next(calls), time.monotonic() + TIMEOUT_SECONDS
    if role == "dies" and call == DIES_AT:
        os.kill(os.getpid(), signal.SIGKILL)
    while role == "waits" and call >= WAITS_AT and not Path(back).exists():
        if time.monotonic() > until:
            sys.exit("the lost replica has not come back")
        time.sleep(0.05)
    if role == "waits" and call >= WAITS_AT:
        time.sleep(0.5)  # it still has to join
    return forward(*arguments)


class Loader(energon_ext.ExactDataLoader):
    def __init__(self, dataset):
        super().__init__(dataset)
        if role == "returns":
            Path(back).touch()


energon_ext.megatron.forward_step = forward_step
energon_ext.ExactDataLoader = Loader
sys.argv = [script, *options]
sys.path.insert(0, str(Path(script).parent))  # as Python does: scripts import their neighbours
runpy.run_path(script, run_name="__main__")
