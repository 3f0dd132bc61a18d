# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""One thread for the connections of all groups of a process.

Each gloo group has a thread of its own that wakes a hundred times a second, and Megatron makes a
hundred groups on each rank: without this, a tenth of the processor time of the suite.
"""

import functools
import os

from torch.distributed import ProcessGroupGloo

_begin = ProcessGroupGloo.__init__


@functools.cache
def _device(process):
    return ProcessGroupGloo.create_default_device()


def _begin_on_one_device(group, store, rank, size, timeout, **further):
    options = ProcessGroupGloo._Options()
    options._devices = [_device(os.getpid())]  # a fork has no thread of its parent
    options._timeout, options._threads = timeout, 2
    for name, value in further.items():  # of newer versions of torch
        setattr(options, name, value)
    _begin(group, store, rank, size, options)


def share_one_device():
    """Let the groups that torch makes from now on share a device."""
    ProcessGroupGloo.__init__ = _begin_on_one_device
