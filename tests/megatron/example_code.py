# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""What the tests use of the examples with a model; the examples are no package."""

import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))
from initial_weights import initialize_weights  # noqa: E402
from megatron_sampler import MegatronSampler, Sampling, draw, generate  # noqa: E402

__all__ = [
    "EXAMPLES",
    "MegatronSampler",
    "Sampling",
    "draw",
    "generate",
    "initialize_weights",
]
