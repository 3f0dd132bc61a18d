# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Megatron's description of the segments of a packed row."""

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams

from energon_ext.batch.packed_batch import PackedBatch
from energon_ext.errors import ConfigError
from energon_ext.megatron.context_groups import check_core, context_group
from energon_ext.megatron.context_parallel import ContextParallelSlice


def build_packed_seq_params(batch: PackedBatch, segments: int | None = None) -> PackedSeqParams:
    """Return Megatron's description of the segments; padding is a separate segment.

    For a context-parallel slice it describes the aligned segments of the whole batch, including
    padding: padding follows its document, so causal attention never reads it.

    ``max_seqlen`` is rounded up. State-space layers (Mamba) read the segments from ``seq_idx``
    with megatron-core 0.17 and later; 0.16 computes it from the ends.

    Args:
        segments: fill up to this number with empty segments, and set ``max_seqlen`` to the length
            of the batch: CUDA graphs replay one shape and one ``max_seqlen``.

    Raises:
        ConfigError: the batch has more segments, or is of a layout and its group was not created
            or megatron-core is older than 0.16.

    Example:
        >>> import numpy as np
        >>> from energon_ext.batch.collate import BatchAssembler
        >>> from energon_ext.batch.rows import Row
        >>> row = Row([np.array([5, 6, 7]), np.array([8])])
        >>> params = build_packed_seq_params(BatchAssembler(4)([row, row], sources=[""]))
        >>> params.cu_seqlens_q.tolist(), params.max_seqlen_q
        ([0, 3, 4, 7, 8], 4)
    """
    ends, longest, positions = batch.cu_seqlens, batch.max_seqlen, batch.num_tokens
    if isinstance(batch, ContextParallelSlice):
        ends, longest, positions = batch.aligned_ends, batch.longest_aligned, batch.whole_length
    if segments is None:
        longest = _round_up(longest, positions)
    else:
        if len(ends) > segments + 1:
            raise ConfigError(
                f"A row has {len(ends) - 1} segments, with padding; CUDA graphs replay {segments}. "
                f"Pack fewer documents per row, or raise --energon-packing-max-docs-per-bin."
            )
        ends = F.pad(ends, (0, segments + 1 - len(ends)), value=positions)
        longest = positions
    params = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
    if batch.context_size is not None:
        check_core()
        params.local_cp_size = batch.context_size
        params.cp_group = context_group(batch)  # None for one rank: Megatron rejects it
    if isinstance(batch, ContextParallelSlice):
        # The same ends: if there are gaps, Transformer Engine does not use its fast kernels.
        params.cu_seqlens_q_padded = params.cu_seqlens_kv_padded = ends
    fields = PackedSeqParams.__dataclass_fields__
    if "pad_between_seqs" in fields:  # megatron-core >= 0.19
        # Otherwise Transformer Engine searches for gaps between segments in every layer.
        params.pad_between_seqs = False
    if "seq_idx" in fields:  # megatron-core >= 0.17
        params.seq_idx = _segment_numbers(ends, positions)
    if "total_tokens" in fields and segments is None:
        # Set after construction, or Megatron would compute seq_idx itself and wait for the device.
        # Not set for CUDA graphs, whose capture constructs a copy.
        params.total_tokens = positions
    return params


def _segment_numbers(ends: torch.Tensor, positions: int) -> torch.Tensor:
    """Return each position's segment number, for state-space layers: int32 [1, positions]."""
    numbers = torch.arange(len(ends) - 1, dtype=torch.int32, device=ends.device)
    return torch.repeat_interleave(numbers, ends.diff(), output_size=positions)[None]


def _round_up(longest: int, positions: int) -> int:
    """Round up to a power of two, as Megatron caches RoPE's angles by this number.

    The result is below ``positions`` if there are several segments: Megatron would take that many
    angles for one angle per position.
    """
    if longest == positions:
        return longest
    return min(1 << (longest - 1).bit_length(), positions - 1)
