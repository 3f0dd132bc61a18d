# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""A batch as one buffer of bytes: how it is written and broadcast.

All tensors of a batch lie one after another in one buffer, 8-byte fields first, so every field is
an aligned view and whatever carries the buffer carries the batch.
"""

from dataclasses import dataclass
from typing import Any, Iterator

import torch


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """Everything needed to know the buffer of a batch: counts, and which optional fields it has."""

    positions: int
    segments: int
    sources: int
    aligned_segments: int | None = None  # m of cu_seqlens_padded
    log_probs: bool = False
    rewards: bool = False

    @classmethod
    def of(cls, batch: Any) -> "BatchSizes":
        padded = batch.cu_seqlens_padded
        return cls(
            positions=batch.tokens.numel(),
            segments=batch.source_ids.numel(),
            sources=len(batch.sources),
            aligned_segments=None if padded is None else padded.numel() - 1,
            log_probs=batch.log_probs is not None,
            rewards=batch.rewards is not None,
        )

    def fields(self) -> Iterator[tuple[str, torch.dtype, int]]:
        """Tensors of the batch in the order of the buffer: name, dtype, number of elements."""
        yield "tokens", torch.int64, self.positions
        yield "labels", torch.int64, self.positions
        yield "position_ids", torch.int64, self.positions
        yield "token_weights", torch.float32, self.positions
        yield "cu_seqlens", torch.int32, self.segments + 1
        yield "source_ids", torch.int32, self.segments
        yield "source_documents", torch.int32, self.sources
        if self.aligned_segments is not None:
            yield "cu_seqlens_padded", torch.int32, self.aligned_segments + 1
        if self.log_probs:
            yield "log_probs", torch.float32, self.positions
        if self.rewards:
            yield "rewards", torch.float32, self.segments

    def tensors(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        """The fields as views of a uint8 tensor."""
        views, start = {}, 0
        for name, dtype, count in self.fields():
            end = start + count * dtype.itemsize
            views[name] = buffer[start:end].view(dtype)
            start = end
        return views

    @property
    def num_bytes(self) -> int:
        return sum(count * dtype.itemsize for _, dtype, count in self.fields())


def as_buffer(batch: Any) -> torch.Tensor:
    """The bytes of all fields, as one uint8 tensor."""
    fields = [getattr(batch, name) for name, *_ in BatchSizes.of(batch).fields()]
    return torch.cat([field.contiguous().view(torch.uint8) for field in fields])
