# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The checkpoints module of the examples, which are not a package."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from checkpoints import RUN, Checkpoints  # noqa: E402

__all__ = ["RUN", "Checkpoints"]
