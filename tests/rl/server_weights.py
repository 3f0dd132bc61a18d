# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The module server_weights of the examples, which are not a package."""

import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))
from server_weights import finish_export, sync_sglang, sync_vllm  # noqa: E402

__all__ = ["EXAMPLES", "finish_export", "sync_sglang", "sync_vllm"]
