# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Context-parallel attention without a GPU: every rank gathers the rows and keeps its own part.

Transformer Engine's attention passes keys and values around a ring. Here each rank computes the
attention of whole rows, so the results must be those of a rank that holds everything.
"""

import dataclasses

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from energon_ext.megatron import SegmentAttention, gpt_layer_spec
from energon_ext.megatron.context_parallel import context_parallel_positions


class _Gather(torch.autograd.Function):
    """The parts of all ranks, one after another; gradients return to the ranks of their parts."""

    @staticmethod
    def forward(context, part, group):
        context.group, context.positions = group, len(part)
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(context, gradient):
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=context.group)
        return gradient.split(context.positions)[dist.get_rank(context.group)], None


class GatheringAttention(SegmentAttention):
    def __init__(self, config, *arguments, **options):
        super().__init__(alone(config), *arguments, **options)

    def forward(self, query, key, value, *_, packed_seq_params, **__):
        group = parallel_state.get_context_parallel_group()
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        ends = packed_seq_params.cu_seqlens_q
        held = [context_parallel_positions(ends, size, each) for each in range(size)]
        order = torch.cat(held).argsort()
        whole = (_Gather.apply(part, group)[order] for part in (query, key, value))
        return super().forward(*whole, packed_seq_params=packed_seq_params)[held[rank]]


def alone(config):
    """The configuration of a rank that holds everything, which the package's layers accept."""
    return dataclasses.replace(config, context_parallel_size=1)


def gathering_layer_spec(config, vp_stage=None):
    """The package's layers, with this attention under context parallelism."""
    block = gpt_layer_spec(alone(config), vp_stage)
    for layer in block.layer_specs if config.context_parallel_size > 1 else ():
        layer.submodules.self_attention.submodules.core_attention = GatheringAttention
    return block
