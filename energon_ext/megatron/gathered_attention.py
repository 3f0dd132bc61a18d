# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Attention of documents that are cut over ranks, without Transformer Engine.

Transformer Engine passes keys and values around a ring. Here every rank gathers those of all ranks
and attends with its own queries: more memory, the same result, on any device.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from energon_ext.megatron.context_parallel import context_parallel_positions


def attend_over_ranks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    ends: torch.Tensor,
    group: dist.ProcessGroup,
    scale: float,
) -> torch.Tensor:
    """Return the causal attention of this rank's positions, within each segment.

    Args:
        query: [positions of this rank, heads, channels].
        key, value: the same with ``groups`` heads.
        ends: int32 [n + 1], ends of the aligned segments of the whole batch.
        group: the ranks that share the batch.

    Returns:
        [positions of this rank, heads * channels].
    """
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    held = torch.cat([context_parallel_positions(ends, size, each) for each in range(size)])
    order, repeats = held.argsort(), query.shape[1] // key.shape[1]
    key, value = (
        _Gather.apply(part, group)[order].repeat_interleave(repeats, dim=1).transpose(0, 1)
        for part in (key, value)
    )
    own = context_parallel_positions(ends, size, rank)
    contexts, begin, taken = [], 0, 0
    for end in ends[1:].tolist():
        count = (end - begin) // size
        positions = own[taken : taken + count]
        mask = torch.arange(begin, end, device=query.device) <= positions[:, None]
        contexts.append(
            F.scaled_dot_product_attention(
                query[taken : taken + count].transpose(0, 1),
                key[:, begin:end],
                value[:, begin:end],
                attn_mask=mask,
                scale=scale,
            )
        )
        begin, taken = end, taken + count
    return torch.cat(contexts, dim=1).transpose(0, 1).flatten(-2)


class _Gather(torch.autograd.Function):
    """The parts of all ranks, one after another; gradients return to the ranks of their parts."""

    @staticmethod
    def forward(context: Any, part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        context.group = group
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = gradient.contiguous().clone()  # the gradient may belong to others
        dist.all_reduce(total, group=context.group)
        return total.chunk(dist.get_world_size(context.group))[dist.get_rank(context.group)], None
