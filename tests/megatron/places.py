# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Where a test compares losses and gradients: on the CPU, and with ``-m gpu`` on a GPU."""

from dataclasses import dataclass

import pytest
import torch

from energon_ext import ConfigError
from tests.megatron.small_gpt import VOCABULARY, small_config, small_model


@dataclass(frozen=True)
class Place:
    """A device and a type.

    Attributes:
        rounding: allowed difference on a GPU, relative to the norm of all values. On the CPU each
            test says what rounding may do there.
    """

    device: str
    dtype: torch.dtype
    rounding: float = 0.0

    def model(self, vocabulary=VOCABULARY, **options):
        """Return a small model here; skip the test if this Megatron has none without its GEMMs."""
        half = self.dtype == torch.bfloat16
        if half:  # as many channels as the kernel for packed attention is made for
            options = {"bf16": True, "kv_channels": 64, **options}
        types = {"params_dtype": self.dtype, "pipeline_dtype": self.dtype}
        try:
            model = small_model(small_config(**{**types, **options}), vocabulary=vocabulary)
        except ConfigError as error:
            if self.device == "cuda" and "use megatron-core 0.17 or later" in str(error):
                pytest.skip(str(error))
            raise
        return model.to(self.device, self.dtype)

    def check_close(self, found, expected, **on_cpu):
        """Compare lists of tensors: each on the CPU, with ``rtol`` and ``atol``, else together."""
        if self.device == "cpu":
            for each, wanted in zip(found, expected):
                torch.testing.assert_close(each, wanted, **on_cpu)
            return
        found, expected = (torch.cat([x.float().flatten() for x in y]) for y in (found, expected))
        assert (found - expected).norm() <= self.rounding * expected.norm()


CPU = Place("cpu", torch.float32)
#: bfloat16 keeps 8 bits.
GPU_FLOAT32, GPU_BFLOAT16 = (
    Place("cuda", torch.float32, rounding=1e-3),
    Place("cuda", torch.bfloat16, rounding=0.02),
)
PLACES = [
    pytest.param(CPU, id="cpu"),
    pytest.param(GPU_FLOAT32, id="gpu-float32", marks=pytest.mark.gpu),
    pytest.param(GPU_BFLOAT16, id="gpu-bfloat16", marks=pytest.mark.gpu),
]
