# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Broadcast a batch from the first tensor-parallel rank without waiting for a GPU.

The other ranks need the number of segments before they launch any kernel, so it must not come from
a GPU. The whole batch is sent over the CPU as one message in page-locked memory: the length of the
message, the length of its header, the header as JSON and the bytes of the batch. The buffer is as
long as the longest message so far; the start of a longer one announces its length, and the message
is sent again.
"""

import functools
import json
from typing import Any, Callable

import torch
import torch.distributed as dist

from energon_ext.batch.packed_batch import PackedBatch, host_buffer
from energon_ext.errors import SampleError

#: Two int64 at the start of a message: its length and the length of its header.
_PREFIX_BYTES = 16
#: The bytes of a batch begin at a multiple of its widest field.
_ALIGNMENT = 8


def broadcast(
    draw: Callable[[], PackedBatch], group: dist.ProcessGroup
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Draw a batch on the first rank of a group; return its bytes and header on every rank."""
    channel = _channel(group)
    if channel.source != dist.get_rank():
        message = channel.exchange(None)
    else:
        message = torch.empty(0, dtype=torch.uint8)
        try:
            message = _message(draw())
        finally:
            # Send an empty message if the draw failed: the other ranks wait for a message.
            message = channel.exchange(message)
    if not len(message):
        raise SampleError(f"Rank {channel.source} failed to draw a batch; see its own error.")
    begin = _PREFIX_BYTES + int(message[8:_PREFIX_BYTES].view(torch.int64))
    header = json.loads(message[_PREFIX_BYTES:begin].numpy().tobytes())
    return message[begin:], header


def _message(batch: PackedBatch) -> torch.Tensor:
    header = json.dumps(batch.header()).encode()
    header += b" " * (-len(header) % _ALIGNMENT)
    content = batch.as_buffer()
    length = _PREFIX_BYTES + len(header) + len(content)
    prefix = torch.tensor([length, len(header)]).view(torch.uint8)
    return torch.cat([prefix, torch.frombuffer(bytearray(header), dtype=torch.uint8), content])


class _Channel:
    """Messages from the first rank of a group to the others, over the CPU."""

    def __init__(self, group: dist.ProcessGroup):
        ranks = dist.get_process_group_ranks(group)
        self.source = ranks[0]
        self._group = group
        if dist.get_backend(group) != "gloo":
            self._group = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
        self._capacity = 4096

    def exchange(self, message: torch.Tensor | None) -> torch.Tensor:
        """Return the first rank's message on every rank; the other ranks pass None."""
        buffer = self._broadcast(message)
        length = int(buffer[:8].view(torch.int64))
        if length > self._capacity:
            self._capacity = length + length // 8  # later messages are about as long
            buffer = self._broadcast(message)
        return buffer[:length]

    def _broadcast(self, message: torch.Tensor | None) -> torch.Tensor:
        buffer = host_buffer(self._capacity)
        buffer[:8] = 0
        if message is not None:
            begin = message[: self._capacity]
            buffer[: len(begin)] = begin
        dist.broadcast(buffer, self.source, group=self._group)
        return buffer


#: One channel per group; Megatron creates its groups once per run.
_channel = functools.cache(_Channel)
