# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Broadcast a batch from the first tensor-parallel rank without waiting for a GPU.

The other ranks need the number of segments before they launch any kernel, so it must not come from
a GPU. The whole batch is sent over the CPU as one message in page-locked memory: the length of the
message, the length of its header, the header and the bytes of the tensors. The buffer is as
long as the longest message so far; the start of a longer one announces its length, and the message
is sent again.
"""

import datetime
from pickle import PicklingError
from typing import Any, Callable, Sequence

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from energon_ext.batch.host_memory import ALIGNMENT, host_buffer, write_bytes
from energon_ext.batch.packed_batch import PackedBatch
from energon_ext.batch.transport import put_together, take_apart, values_of
from energon_ext.errors import ConfigError, SampleError
from energon_ext.megatron.rank_data import rank_data
from energon_ext.state.together import create_group_of

#: Two int64 at the start of a message: its length and the length of its header.
_PREFIX_BYTES = 16


def create_broadcast_groups(timeout: datetime.timedelta | None = None) -> None:
    """Create the gloo groups in which tensor-parallel ranks receive their batches.

    All ranks of the run call this together, after ``initialize_model_parallel``; the provider for
    Megatron-LM does. A run that begins again with the same groups calls it again, which drops the
    micro-batches that virtual pipeline stages had not taken.

    Args:
        timeout: how long a rank waits for a batch; by default torch's for gloo, 30 minutes.
    """
    data = rank_data()
    data.waiting.clear()
    data.recomputed.clear()
    own = dist.get_process_group_ranks(parallel_state.get_tensor_model_parallel_group())
    if len(own) == 1:
        return  # then it is so on all ranks
    data.channel = _Channel(create_group_of(tuple(own), timeout), own[0])


def broadcast(draw: Callable[[], PackedBatch], device: torch.device) -> tuple[str, dict[str, Any]]:
    """Draw a batch on the first tensor-parallel rank; return its class and fields on every rank."""
    channel: _Channel | None = rank_data().channel
    if channel is None:
        raise ConfigError(
            "get_batch: the tensor-parallel ranks have no group for batches; call energon_ext."
            "megatron.create_broadcast_groups() on all ranks after initialize_model_parallel()."
        )
    if channel.source != dist.get_rank():
        message = channel.exchange(None)
    else:
        parts: list[np.ndarray] = []
        try:
            parts = _message(draw())
        finally:
            # Send an empty message if the draw failed: the other ranks wait for a message.
            message = channel.exchange(parts)
    if not len(message):
        raise SampleError(f"Rank {channel.source} failed to draw a batch; see its own error.")
    begin = _PREFIX_BYTES + int(message[8:_PREFIX_BYTES].view(torch.int64))
    content = message[begin:].to(device, non_blocking=True)
    name, values = put_together(message[_PREFIX_BYTES:begin].numpy(), content)
    return name, values


def _message(batch: PackedBatch) -> list[np.ndarray]:
    """Return the parts of a message, each uint8 [bytes]."""
    name = type(batch).__name__
    try:
        header, tensors = take_apart((name, values_of(batch)))
    except PicklingError as error:
        raise ConfigError(
            f"{name}: a field cannot be pickled for the other ranks ({error}); change it, or do "
            f"without tensor parallelism."
        ) from error
    header += b" " * (-len(header) % ALIGNMENT)
    content = np.empty(tensors.end, np.uint8)
    tensors.write(content)
    prefix = np.array([_PREFIX_BYTES + len(header) + len(content), len(header)], np.int64)
    return [prefix.view(np.uint8), np.frombuffer(header, np.uint8), content]


class _Channel:
    """Messages from the first rank of a group to the others, over the CPU."""

    def __init__(self, group: dist.ProcessGroup, source: int):
        self.source = source
        self._group = group
        self._capacity = 4096

    def exchange(self, parts: Sequence[np.ndarray] | None) -> torch.Tensor:
        """Return the first rank's message on every rank; the other ranks pass None."""
        buffer = self._broadcast(parts)
        length = int(buffer[:8].view(torch.int64))
        if length > self._capacity:
            self._capacity = length + length // 8  # later messages are about as long
            buffer = self._broadcast(parts)
        return buffer[:length]

    def _broadcast(self, parts: Sequence[np.ndarray] | None) -> torch.Tensor:
        buffer = host_buffer(self._capacity)
        if parts is not None:
            length = sum(map(len, parts))
            buffer[:8].view(torch.int64)[0] = length
            if 0 < length <= self._capacity:
                write_bytes(parts, buffer)
        dist.broadcast(buffer, self.source, group=self._group)
        return buffer
