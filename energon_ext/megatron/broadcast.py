# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""One rank draws a batch, its group receives it: two messages, whatever the batch holds.

The first is a header of fixed size with everything needed to know the second, which is the batch
as one buffer of bytes: 8-byte fields first, so every field is an aligned view of the buffer and
nothing is copied on arrival.
"""

from __future__ import annotations

import json
from typing import Callable

import torch
import torch.distributed as dist

from energon_ext.batch.buffer import BatchSizes, as_buffer
from energon_ext.batch.packed_batch import PackedBatch
from energon_ext.errors import SampleError

#: The sizes of the batch, bytes of the source names, longest segment. All zeros: the source failed.
_HEADER_SIZE = 8


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
    if dist.get_rank() == source_rank:
        return _send(draw, source_rank, group, device)
    return _receive(source_rank, group, device)


def _send(
    draw: Callable[[], PackedBatch], rank: int, group: dist.ProcessGroup, device: torch.device
) -> PackedBatch:
    header = [0] * _HEADER_SIZE
    try:
        batch = draw()
        sizes = BatchSizes.of(batch)
        names = _encode_names(batch.sources)
        header = [*sizes.to_list(), len(names), batch.max_seqlen]
    finally:
        # Also when the draw failed: the others wait for this message.
        dist.broadcast(torch.tensor(header, device=device), rank, group=group)
    buffer = torch.cat([as_buffer(batch), names]).to(device)
    dist.broadcast(buffer, rank, group=group)
    return _from_message(buffer, header)


def _receive(rank: int, group: dist.ProcessGroup, device: torch.device) -> PackedBatch:
    message = torch.zeros(_HEADER_SIZE, dtype=torch.int64, device=device)
    dist.broadcast(message, rank, group=group)
    header = message.tolist()
    if not any(header):
        raise SampleError(f"Rank {rank} failed to draw a batch; its own error says why.")
    *sizes, name_bytes, _ = header
    num_bytes = BatchSizes.from_list(sizes).num_bytes + name_bytes
    buffer = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    dist.broadcast(buffer, rank, group=group)
    return _from_message(buffer, header)


def _from_message(buffer: torch.Tensor, header: list[int]) -> PackedBatch:
    *values, _, max_seqlen = header
    sizes = BatchSizes.from_list(values)
    sources = _decode_names(buffer[sizes.num_bytes :])
    return PackedBatch.from_buffer(buffer, sizes, sources, max_seqlen)


def _encode_names(sources: tuple[str, ...]) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(sources).encode()), dtype=torch.uint8)


def _decode_names(data: torch.Tensor) -> tuple[str, ...]:
    return tuple(json.loads(bytes(data.tolist())))
