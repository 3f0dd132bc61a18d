# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""One rank draws a batch, its group receives it: an announcement, and one buffer of bytes.

The announcement is an object that torch pickles; it says how the fields lie in the buffer. Those of
8 bytes come first, so every field is an aligned view and nothing is copied on arrival.
"""

from typing import Any, Callable

import torch
import torch.distributed as dist

from energon_ext.batch.buffer import BatchSizes, as_buffer
from energon_ext.batch.packed_batch import PackedBatch
from energon_ext.errors import SampleError


def broadcast_batch(
    draw: Callable[[], PackedBatch],
    *,
    source_rank: int,
    group: dist.ProcessGroup,
    device: torch.device,
) -> PackedBatch:
    """Draw on one rank, return the batch on every rank of the group.

    Args:
        draw: called on the source only.
        source_rank: global rank of the source.
        group: all ranks of it call this function.
        device: where the group communicates and the batch is wanted.

    Raises:
        SampleError: on the other ranks, when ``draw`` raised. No rank is left waiting.
    """
    is_source = dist.get_rank() == source_rank
    message: list[Any] = [None]
    try:
        if is_source:
            batch = draw()
            buffer = as_buffer(batch).to(device)
            message = [(BatchSizes.of(batch), batch.sources, batch.max_seqlen)]
    finally:
        # Also when the draw failed: the others wait for this message.
        dist.broadcast_object_list(message, source_rank, group=group, device=device)
    if message[0] is None:
        raise SampleError(f"Rank {source_rank} failed to draw a batch; its own error says why.")
    sizes, sources, max_seqlen = message[0]
    if not is_source:
        buffer = torch.empty(sizes.num_bytes, dtype=torch.uint8, device=device)
    dist.broadcast(buffer, source_rank, group=group)
    return PackedBatch.from_buffer(buffer, sizes, sources, max_seqlen)
