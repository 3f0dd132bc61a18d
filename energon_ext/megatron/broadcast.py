# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""One rank draws a batch, its group receives it: what lies where, and one buffer of bytes."""

from typing import Any, Callable

import torch
import torch.distributed as dist

from energon_ext.batch.packed_batch import PackedBatch
from energon_ext.errors import SampleError


def broadcast_batch(
    draw: Callable[[], PackedBatch],
    *,
    source_rank: int,
    group: dist.ProcessGroup,
    device: torch.device,
) -> PackedBatch:
    """Draw on one (global) rank, return the batch on every rank of the group.

    Raises:
        SampleError: on the other ranks, when ``draw`` raised. No rank is left waiting.
    """
    is_source = dist.get_rank() == source_rank
    message: list[Any] = [None]
    try:
        if is_source:
            batch = draw()
            buffer = batch.as_buffer().to(device)
            message = [(buffer.numel(), batch.layout(), batch.sources, batch.max_seqlen)]
    finally:
        # Also when the draw failed: the others wait for this message.
        dist.broadcast_object_list(message, source_rank, group=group, device=device)
    if message[0] is None:
        raise SampleError(f"Rank {source_rank} failed to draw a batch; its own error says why.")
    num_bytes, *fields = message[0]
    if not is_source:
        buffer = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    dist.broadcast(buffer, source_rank, group=group)
    return PackedBatch.from_buffer(buffer, *fields)
