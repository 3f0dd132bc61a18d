# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Settings that save time in test processes; import it before anything that imports torch."""

import os

# Megatron asks torch to compile functions when it is imported, which imports the compiler. On the
# CPU nothing of it is used.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

# Tests kill processes and not machines, so nothing needs to reach the disk. The descriptor is still
# checked.
os.fsync = os.fstat
