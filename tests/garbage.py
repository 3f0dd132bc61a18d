# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Garbage collection that skips everything that was imported."""

import gc


def leave_imports_alone():
    """Exclude existing objects from collections, here and in forked processes.

    Energon collects whenever a loader starts, and unfreezes everything when it ends. Collecting
    everything that Megatron imports takes 0.2 s, and a forked process copies what it touches.
    """
    gc.unfreeze = lambda: None
    gc.collect()
    gc.freeze()
