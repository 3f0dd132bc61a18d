# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Split a batch over context-parallel ranks, segment by segment.

Under causal attention the end of a segment costs more than its beginning. Each aligned segment is
therefore cut into ``2 * size`` equal chunks, and rank ``r`` takes chunks ``r`` and
``2 * size - 1 - r``, as Transformer Engine's attention and Megatron's RoPE expect.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from energon_ext.batch.host_memory import take
from energon_ext.batch.packed_batch import PackedBatch
from energon_ext.batch.transport import build, tensors_of, values_of
from energon_ext.errors import ConfigError

_FIELDS_OF_POSITIONS = ("tokens", "labels", "token_weights", "position_ids", "log_probs")
_OWN_FIELDS = {field.name for field in dataclasses.fields(PackedBatch)}


@dataclass(kw_only=True)
class ContextParallelSlice(PackedBatch):
    """One rank's part of a batch: a batch with this rank's part of every segment."""

    # Of the whole batch:
    aligned_ends: torch.Tensor  # int32 [m + 1], ends of the aligned segments
    document_ends: torch.Tensor  # int32 [n + 1], as returned by document_ends()
    longest_aligned: int  # positions of the longest aligned segment
    whole_length: int  # positions

    @property
    def most_pairs(self) -> int:
        """A number above all ``pair_ids``, the same on all ranks."""
        return len(self.document_ends) - 1


#: For each class of batches, the class of their slices.
_slice_classes: dict[Any, Any] = {PackedBatch: ContextParallelSlice}


def slice_class(batch_class: type[PackedBatch]) -> Any:
    """Return the class of slices of a class of batches, a subclass of it."""
    if batch_class not in _slice_classes:
        name = f"{batch_class.__name__}Slice"
        bases = (ContextParallelSlice, batch_class)
        _slice_classes[batch_class] = dataclasses.make_dataclass(name, [], bases=bases)
    return _slice_classes[batch_class]


def slice_for_context_parallel(batch: PackedBatch, size: int, rank: int) -> ContextParallelSlice:
    """Return a context-parallel rank's part of a batch, of its class and a ContextParallelSlice.

    Tensors that a subclass adds are cut at their N positions, except its ``whole_fields``. Labels
    are already shifted, so none is lost at the edge of a chunk. Split the batch before it moves to
    a GPU: every size read back from a GPU would wait for it.

    Args:
        batch: its aligned segments must be multiples of ``2 * size`` positions.
        size: number of context-parallel ranks.
        rank: 0, 1, ...

    Raises:
        ConfigError: a segment is not aligned, or a tensor of a subclass has not N positions and is
            not in its ``whole_fields``.
    """
    aligned_ends = batch.cu_seqlens if batch.cu_seqlens_padded is None else batch.cu_seqlens_padded
    positions = _positions(aligned_ends, size, rank)
    # Padding follows its segment, so a rank's part of each segment is contiguous and they ascend.
    segment_of = np.searchsorted(batch.cu_seqlens.cpu().numpy(), positions, "right") - 1
    segments, lengths = np.unique(segment_of, return_counts=True)
    ends = torch.from_numpy(np.array([0, *lengths.cumsum()], np.int32))
    values = values_of(batch)
    for name in (*_FIELDS_OF_POSITIONS, *_added_fields_of_positions(batch, values)):
        if values[name] is not None:
            values[name] = take(values[name], positions)
    values.update(
        columns={name: take(column, positions) for name, column in batch.columns.items()},
        segments={name: take(values, segments) for name, values in batch.segments.items()},
        cu_seqlens=ends.to(batch.cu_seqlens.device),
        cu_seqlens_padded=None,
        max_seqlen=int(lengths.max()),
        source_ids=take(batch.source_ids, segments),
        rewards=None if batch.rewards is None else take(batch.rewards, segments),
        pair_ids=None if batch.pair_ids is None else take(batch.pair_ids, segments),
        aligned_ends=aligned_ends,
        document_ends=document_ends(batch),
        longest_aligned=int(aligned_ends.diff().max()),
        whole_length=batch.num_tokens,
    )
    part: ContextParallelSlice = build(slice_class(type(batch)), values)
    return part


def _added_fields_of_positions(batch: PackedBatch, values: dict[str, Any]) -> list[str]:
    """Return the names of a subclass's tensors that are cut at their positions."""
    names, kind = [], type(batch)
    for name, value in values.items():
        if name in _OWN_FIELDS or name in kind.whole_fields:
            continue
        if isinstance(value, torch.Tensor) and value.shape[:1] == (batch.num_tokens,):
            names.append(name)
        elif tensors_of(value):
            found = list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            raise ConfigError(
                f"{kind.__name__}.{name}: {found} found, which context parallelism cannot cut into "
                f"the parts of {batch.num_tokens} positions; if every rank needs all of it, set "
                f'whole_fields = ("{name}",) in the class.'
            )
    return names


def document_ends(batch: PackedBatch) -> torch.Tensor:
    """Return the segment ends as if padding had no length: int32 [n + 1]."""
    if isinstance(batch, ContextParallelSlice):
        return batch.document_ends
    lengths = batch.segment_lengths() * (batch.source_ids >= 0)
    return F.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)


def context_parallel_positions(
    cu_seqlens_padded: torch.Tensor, size: int, rank: int
) -> torch.Tensor:
    """Return a context-parallel rank's positions, in its order: int64 [N / size].

    Raises:
        ConfigError: a segment is not a multiple of ``2 * size`` positions long.

    Example:
        >>> context_parallel_positions(torch.tensor([0, 4, 12]), size=2, rank=0)
        tensor([ 0,  3,  4,  5, 10, 11])
    """
    positions = torch.from_numpy(_positions(cu_seqlens_padded, size, rank))
    return positions.to(cu_seqlens_padded.device)


def _positions(aligned_ends: torch.Tensor, size: int, rank: int) -> np.ndarray:
    """Return the positions by NumPy: torch would wake all its threads in every micro-batch."""
    ends, alignment = aligned_ends.cpu().numpy().astype(np.int64), 2 * size
    lengths = np.diff(ends)
    if len(cut := np.flatnonzero(lengths % alignment)):
        raise ConfigError(
            f"Segment {cut[0]} of the batch takes {lengths[cut[0]]} positions; "
            f"context_parallel_size={size} needs multiples of {alignment}. Let the task encoder "
            f"align segments to {alignment}."
        )
    # Number each position by its chunk within its segment.
    offset = np.arange(ends[-1] - ends[0]) - np.repeat(ends[:-1] - ends[0], lengths)
    chunk = offset // np.repeat(lengths // alignment, lengths)
    return np.flatnonzero((chunk == rank) | (chunk == alignment - 1 - rank))
