# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Megatron's own context parallelism on CPUs, with the attention that layouts use."""

import dataclasses

from megatron.core import parallel_state

from energon_ext.megatron import SegmentAttention, gpt_layer_spec
from energon_ext.megatron.gathered_attention import attend_over_ranks


class GatheringAttention(SegmentAttention):
    def __init__(self, config, *arguments, **options):
        super().__init__(alone(config), *arguments, **options)

    def forward(self, query, key, value, *_, packed_seq_params, **__):
        group, ends = parallel_state.get_context_parallel_group(), packed_seq_params.cu_seqlens_q
        return attend_over_ranks(query, key, value, ends, group, self.softmax_scale)


def alone(config):
    """The configuration of a rank that holds everything, which the package's layers accept."""
    return dataclasses.replace(config, context_parallel_size=1)


def gathering_layer_spec(config, vp_stage=None):
    """The package's layers, with this attention under context parallelism."""
    block = gpt_layer_spec(alone(config), vp_stage)
    for layer in block.layer_specs if config.context_parallel_size > 1 else ():
        layer.submodules.self_attention.submodules.core_attention = GatheringAttention
    return block
