# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""A batch cut over context-parallel ranks, segment by segment.

Under causal attention the end of a segment costs more than its beginning. So each aligned segment
is cut into ``2 * size`` equal chunks, and rank ``r`` takes chunk ``r`` and chunk
``2 * size - 1 - r``: every rank has as many positions and as much attention as any other. It is
the layout that Transformer Engine's attention and Megatron's RoPE expect of a packed sequence.
They are told the ends of the whole batch, not those of the slice.
"""

import dataclasses
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from energon_ext.batch.packed_batch import PackedBatch
from energon_ext.errors import ConfigError

_FIELDS_OF_POSITIONS = ("tokens", "labels", "token_weights", "position_ids", "log_probs")


@dataclass
class ContextParallelSlice(PackedBatch):
    """One rank's part of a batch; itself a batch, whose segments are the parts that it holds.

    Attributes:
        whole: the batch it was cut from.
    """

    whole: PackedBatch | None = None


def slice_for_context_parallel(batch: PackedBatch, size: int, rank: int) -> ContextParallelSlice:
    """Return what a context-parallel rank holds of a batch.

    Labels are cut as they stand: they were shifted before, so none is lost at the edge of a chunk.

    Args:
        batch: its aligned segments are multiples of ``2 * size`` positions.
        size: number of context-parallel ranks.
        rank: 0, 1, ...

    Raises:
        ConfigError: a segment is not aligned.

    Example:
        >>> import torch
        >>> numbers = torch.arange(8)
        >>> one, ends = torch.ones(1, dtype=torch.int32), torch.tensor([0, 8], dtype=torch.int32)
        >>> batch = PackedBatch(
        ...     numbers, numbers, torch.ones(8), numbers, ends, 8, 0 * one, ("web",), one)
        >>> [slice_for_context_parallel(batch, 2, rank).tokens.tolist() for rank in (0, 1)]
        [[0, 1, 6, 7], [2, 3, 4, 5]]
    """
    positions = context_parallel_positions(_aligned_ends(batch), size, rank)
    segment_of_position = torch.repeat_interleave(
        torch.arange(len(batch.source_ids), device=positions.device),
        batch.segment_lengths().long(),
    )
    # Padding follows its segment, so what a rank holds of each is in one piece.
    segments, lengths = torch.unique_consecutive(segment_of_position[positions], return_counts=True)
    values = {field.name: getattr(batch, field.name) for field in dataclasses.fields(PackedBatch)}
    for name in _FIELDS_OF_POSITIONS:
        if values[name] is not None:
            values[name] = values[name][positions]
    values.update(
        cu_seqlens=_ends(lengths),
        cu_seqlens_padded=None,
        max_seqlen=int(lengths.max()),
        source_ids=batch.source_ids[segments],
        rewards=None if batch.rewards is None else batch.rewards[segments],
    )
    return ContextParallelSlice(**values, whole=batch)


def context_parallel_positions(
    cu_seqlens_padded: torch.Tensor, size: int, rank: int
) -> torch.Tensor:
    """Return which positions of a batch a context-parallel rank holds, in its order.

    Args:
        cu_seqlens_padded: int32 [m + 1], ends of the aligned segments.
        size: number of context-parallel ranks.
        rank: 0, 1, ...

    Returns:
        int64 [N / size].

    Raises:
        ConfigError: a segment is not a multiple of ``2 * size`` positions long.

    Example:
        >>> context_parallel_positions(torch.tensor([0, 4, 12]), size=2, rank=0)
        tensor([ 0,  3,  4,  5, 10, 11])
    """
    ends, alignment = cu_seqlens_padded.long(), 2 * size
    lengths = ends.diff()
    if len(cut := (lengths % alignment).nonzero()):
        raise ConfigError(
            f"Segment {int(cut[0])} of the batch takes {int(lengths[cut[0]])} positions; "
            f"context_parallel_size={size} needs multiples of {alignment}. Let the task encoder "
            f"align segments to {alignment}."
        )
    here = ends // size  # ends of the segments in the slice
    chunks = lengths // alignment
    segment = torch.repeat_interleave(torch.arange(len(chunks), device=ends.device), here.diff())
    offset = torch.arange(len(segment), device=ends.device) - here[segment]
    chunk = chunks[segment]
    # In the late chunk offset counts on from the early one.
    skipped = torch.where(offset < chunk, rank * chunk, (2 * size - 2 - rank) * chunk)
    return ends[segment] + skipped + offset


def attention_ends(batch: PackedBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the segments of a whole batch, told apart from the padding between them.

    The first are running sums of the lengths without alignment, the second say where the segments
    lie. A segment that is nothing but padding counts in full, because kernels want no empty ones.

    Returns:
        ``(cu_seqlens, cu_seqlens_padded)``, both int32 [m + 1].
    """
    padded = _aligned_ends(batch)
    held = torch.where(batch.source_ids < 0, 0, batch.segment_lengths())
    held_before = _ends(held)[torch.searchsorted(batch.cu_seqlens, padded)]
    lengths = torch.where(held_before.diff() > 0, held_before.diff(), padded.diff())
    return _ends(lengths), padded


def _aligned_ends(batch: PackedBatch) -> torch.Tensor:
    return batch.cu_seqlens if batch.cu_seqlens_padded is None else batch.cu_seqlens_padded


def _ends(lengths: torch.Tensor) -> torch.Tensor:
    return F.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
