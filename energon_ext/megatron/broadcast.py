# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""One rank draws a batch, its group receives it: two messages, whatever the batch holds.

The first is a header of fixed size with everything needed to know the second, which is the batch
as one buffer of bytes: 8-byte fields first, so every field is an aligned view of the buffer and
nothing is copied on arrival.
"""

from __future__ import annotations

import json
from typing import Callable, Iterator

import torch
import torch.distributed as dist

from energon_ext.batch import PackedBatch
from energon_ext.errors import SampleError

#: positions, segments, sources, bytes of their names, longest segment, ends in cu_seqlens_padded,
#: and which of the other optional fields are there. All zeros: the source failed to draw.
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


def _send(draw, rank: int, group: dist.ProcessGroup, device: torch.device) -> PackedBatch:
    header = torch.zeros(_HEADER_SIZE, dtype=torch.int64)
    try:
        batch = draw()
        names = _encode_names(batch.sources)
        header = _header(batch, len(names))
    finally:
        # Also when the draw failed: the others wait for this message.
        dist.broadcast(header.to(device), rank, group=group)
    sizes = header.tolist()
    fields = [_as_bytes(getattr(batch, name)) for name, *_ in _fields(sizes)]
    buffer = torch.cat([*fields, names]).to(device)
    dist.broadcast(buffer, rank, group=group)
    return _from_buffer(buffer, sizes)


def _receive(rank: int, group: dist.ProcessGroup, device: torch.device) -> PackedBatch:
    header = torch.zeros(_HEADER_SIZE, dtype=torch.int64, device=device)
    dist.broadcast(header, rank, group=group)
    sizes = header.tolist()
    if not any(sizes):
        raise SampleError(f"Rank {rank} failed to draw a batch; its own error says why.")
    buffer = torch.empty(_buffer_size(sizes), dtype=torch.uint8, device=device)
    dist.broadcast(buffer, rank, group=group)
    return _from_buffer(buffer, sizes)


def _header(batch: PackedBatch, name_bytes: int) -> torch.Tensor:
    return torch.tensor(
        [
            batch.num_tokens,
            len(batch.source_ids),
            len(batch.sources),
            name_bytes,
            batch.max_seqlen,
            0 if batch.cu_seqlens_padded is None else len(batch.cu_seqlens_padded),
            batch.log_probs is not None,
            batch.rewards is not None,
        ],
        dtype=torch.int64,
    )


def _fields(sizes: list[int]) -> Iterator[tuple[str, torch.dtype, int]]:
    """Tensors of a batch in the order of the buffer: name, dtype and number of elements."""
    positions, segments, sources, _, _, padded_ends, has_log_probs, has_rewards = sizes
    yield "tokens", torch.int64, positions
    yield "labels", torch.int64, positions
    yield "position_ids", torch.int64, positions
    yield "token_weights", torch.float32, positions
    yield "cu_seqlens", torch.int32, segments + 1
    yield "source_ids", torch.int32, segments
    yield "source_documents", torch.int32, sources
    if padded_ends:
        yield "cu_seqlens_padded", torch.int32, padded_ends
    if has_log_probs:
        yield "log_probs", torch.float32, positions
    if has_rewards:
        yield "rewards", torch.float32, segments


def _buffer_size(sizes: list[int]) -> int:
    return sum(count * dtype.itemsize for _, dtype, count in _fields(sizes)) + sizes[3]


def _from_buffer(buffer: torch.Tensor, sizes: list[int]) -> PackedBatch:
    tensors, start = {}, 0
    for name, dtype, count in _fields(sizes):
        end = start + count * dtype.itemsize
        tensors[name] = buffer[start:end].view(dtype)
        start = end
    return PackedBatch(**tensors, max_seqlen=sizes[4], sources=_decode_names(buffer[start:]))


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def _encode_names(sources: tuple[str, ...]) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(sources).encode()), dtype=torch.uint8)


def _decode_names(data: torch.Tensor) -> tuple[str, ...]:
    return tuple(json.loads(bytes(data.tolist())))
