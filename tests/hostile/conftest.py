# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Every test here has limits on time and memory: hostile input may have none."""

import resource
import signal

import pytest

#: Seconds, and bytes on top of what the process already uses.
MAX_SECONDS, MAX_MEMORY = 20, 3 * 2**29


@pytest.fixture(autouse=True)
def _limits():
    def too_long(*_):
        raise TimeoutError("a test of hostile input takes too long")

    with open("/proc/self/status") as status:
        used = next(int(line.split()[1]) << 10 for line in status if line.startswith("VmData"))
    before = resource.getrlimit(resource.RLIMIT_DATA)
    handler = signal.signal(signal.SIGALRM, too_long)
    resource.setrlimit(resource.RLIMIT_DATA, (used + MAX_MEMORY, before[1]))
    signal.alarm(MAX_SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, handler)
    resource.setrlimit(resource.RLIMIT_DATA, before)
