# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The launch script with attention that is context-parallel on CPUs, and segments aligned to 4."""

import functools
import runpy

import torch

import energon_ext.megatron
from energon_ext import PackedTaskEncoder
from energon_ext.tokenizers.tokenizers import ByteTokenizer
from tests.megatron.gathering_attention import gathering_layer_spec
from tests.megatron.megatron_lm_on_cpu import LAUNCH

SEQ_LEN = 64


def seeded_layer_spec(config, vp_stage=None):
    """The layers of a model that begins with the same weights with and without parallelism."""
    torch.manual_seed(1)
    return gathering_layer_spec(config, vp_stage)


package = energon_ext.megatron
package.gpt_layer_spec = seeded_layer_spec
package.train_valid_test_dataloaders_provider = functools.partial(
    package.train_valid_test_dataloaders_provider,
    task_encoder=PackedTaskEncoder(ByteTokenizer(), SEQ_LEN, alignment=4),
)
package.train_valid_test_dataloaders_provider.is_distributed = True
runpy.run_path(str(LAUNCH / "pretrain_gpt.py"), run_name="__main__")
