# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Collections of garbage that pass over everything that was imported."""

import gc


def leave_imports_alone():
    """Keep what exists by now out of collections, here and in processes that are forked from here.

    Energon collects whenever a loader begins and thaws everything when it ends. A collection over
    all that Megatron imports takes 0.2 s, and a forked process copies what it touches.
    """
    gc.unfreeze = lambda: None
    gc.collect()
    gc.freeze()
