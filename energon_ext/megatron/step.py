# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""One training step's data, forward pass and loss, as Megatron's schedules call them."""

import sys
from typing import Any, Callable, Iterator

import megatron.core
import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams

from energon_ext.batch.packed_batch import PackedBatch
from energon_ext.errors import ConfigError
from energon_ext.megatron.broadcast import broadcast
from energon_ext.megatron.context_parallel import (
    ContextParallelSlice,
    document_ends,
    slice_for_context_parallel,
)
from energon_ext.megatron.loss import LossFunc, check_loss_inputs, loss_func_of
from energon_ext.megatron.moe import check_router_losses, padding_mask_for, unwrap
from energon_ext.megatron.mtp import loss_mask_for
from energon_ext.state.together import collective_device

_CORE_VERSION = tuple(map(int, megatron.core.__version__.split(".")[:2]))


def get_batch(
    data_iterator: Iterator[PackedBatch] | None, check: Callable[[PackedBatch], None] | None = None
) -> PackedBatch:
    """Return this micro-batch on this rank's device, the same on all ranks of a model replica.

    Tensor-parallel rank 0 of every pipeline stage draws it; the loader is deterministic, so all
    stages have the same. With context parallelism each rank gets its
    :func:`~energon_ext.megatron.slice_for_context_parallel`. Nothing here waits for the device.

    Args:
        data_iterator: the loader on tensor-parallel rank 0; not looked at on other ranks.
        check: called there with the batch as it was drawn, to refuse it.

    Raises:
        ConfigError: tensor-parallel rank 0 has no iterator, or a segment is not aligned for
            context parallelism.
        SampleError: tensor-parallel rank 0 failed to draw; there the original error is raised.
        StopIteration: the iterator ended.
    """
    device = collective_device()
    size = parallel_state.get_context_parallel_world_size()

    def draw() -> PackedBatch:
        batch = _draw(data_iterator)
        if check is not None:
            check(batch)
        if size == 1:
            return batch
        return slice_for_context_parallel(batch, size, parallel_state.get_context_parallel_rank())

    if parallel_state.get_tensor_model_parallel_world_size() == 1:
        return draw().to(device)
    buffer, header = broadcast(draw, parallel_state.get_tensor_model_parallel_group())
    held = PackedBatch if size == 1 else ContextParallelSlice
    return held.from_buffer(buffer.to(device, non_blocking=True), header)


def build_packed_seq_params(batch: PackedBatch) -> PackedSeqParams:
    """Return Megatron's description of the segments; padding is a segment of its own.

    Of a slice for context parallelism it describes the aligned segments of the whole batch, padding
    included: padding follows its document, so causal attention never looks at it.

    ``max_seqlen`` is rounded up. Layers of state spaces (Mamba) find the segments in ``seq_idx``,
    from megatron-core 0.17 on; 0.16 makes it from the ends.

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
    more: dict[str, Any] = {}
    if isinstance(batch, ContextParallelSlice):
        assert batch.aligned_ends is not None  # a default, because those of PackedBatch have one
        ends, longest, positions = batch.aligned_ends, batch.longest_aligned, batch.whole_length
        # The same: told of gaps, Transformer Engine does without its fast kernels.
        more = {"cu_seqlens_q_padded": ends, "cu_seqlens_kv_padded": ends}
    known = PackedSeqParams.__dataclass_fields__
    if "pad_between_seqs" in known:  # megatron-core >= 0.19
        # Not told, Transformer Engine looks for gaps between segments, in every layer.
        more["pad_between_seqs"] = False
    if "seq_idx" in known:  # megatron-core >= 0.17
        more["seq_idx"] = _segment_numbers(ends, positions)
    longest = _rounded_up(longest, positions)
    params = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        **more,
    )
    if "total_tokens" in known:
        # Afterwards: told at once, Megatron makes seq_idx itself, and waits for the device.
        params.total_tokens = positions
    return params


def _segment_numbers(ends: torch.Tensor, positions: int) -> torch.Tensor:
    """int32 [1, positions], by which layers of state spaces know where a segment begins."""
    numbers = torch.arange(len(ends) - 1, dtype=torch.int32, device=ends.device)
    return torch.repeat_interleave(numbers, ends.diff(), output_size=positions)[None]


def _rounded_up(longest: int, positions: int) -> int:
    """A power of two, of which there are few: Megatron keeps the angles of RoPE by this number.

    Less than all positions where these are several segments: Megatron takes as many angles as
    positions for one angle of each.
    """
    if longest == positions:
        return longest
    return min(1 << (longest - 1).bit_length(), positions - 1)


def forward_step(
    data_iterator: Iterator[PackedBatch] | None,
    model: torch.nn.Module,
    *,
    denominator: str = "weights",
    weight_scale: int = 1,
    ratio_limit: float | None = None,
) -> tuple[torch.Tensor, LossFunc]:
    """Run one micro-batch through the model, as Megatron's schedules call it.

    The batch is one packed sequence: give the schedule ``micro_batch_size=1`` and
    ``seq_length=rows * seq_len``. For other arguments than the defaults pass
    ``functools.partial(forward_step, denominator="tokens")``.

    Args:
        data_iterator: the loader on tensor-parallel rank 0; not looked at on other ranks.
        model: a ``GPTModel``, wrapped or not.
        denominator, weight_scale, ratio_limit: see :func:`energon_ext.megatron.make_loss_func`.

    Returns:
        The model's output (on the last stage the loss of each position, [1, N]) and the loss
        function.

    Raises:
        ConfigError: with a ``weight_scale``, routers that were not told of it (see
            :func:`energon_ext.megatron.scale_router_losses`) or multi-token prediction, which
            does without context parallelism too.
    """
    check_router_losses(model, weight_scale)
    _check_state_spaces(model)
    options = (denominator, weight_scale, ratio_limit)
    batch = get_batch(data_iterator, lambda drawn: check_loss_inputs(drawn, *options))
    _count_work(batch, model)
    output = model(
        batch.tokens[None],
        batch.position_ids[None],
        None,  # attention mask: the segments say it all
        labels=batch.labels[None],
        packed_seq_params=build_packed_seq_params(batch),
        **padding_mask_for(model, batch),
        **loss_mask_for(model, batch, weight_scale),
    )
    return output, loss_func_of(batch, *options)


def _check_state_spaces(model: torch.nn.Module) -> None:
    if _CORE_VERSION >= (0, 16):
        return
    # Not by its class, which cannot be imported where triton is not installed.
    if any(type(module).__name__ == "MambaMixer" for module in model.modules()):
        raise ConfigError(
            "The model has layers of state spaces (Mamba), which mix the documents of a packed row "
            "in this version of megatron-core; use megatron-core 0.16 or later."
        )


def _count_work(batch: PackedBatch, model: torch.nn.Module) -> None:
    """Tell Megatron-LM how long the documents are, where it asks (from megatron-core 0.18 on).

    Its FLOPs and throughput are those of attention over whole rows otherwise. It counts what every
    rank tells it once, so only the first virtual stage of a rank does, and no evaluation.
    """
    training = sys.modules.get("megatron.training.training")
    update = getattr(training, "update_seqlen_stats_from_cu_seqlens", None)
    if update and torch.is_grad_enabled() and not getattr(unwrap(model), "vp_stage", None):
        update(document_ends(batch))


def _draw(data_iterator: Iterator[PackedBatch] | None) -> PackedBatch:
    if data_iterator is None:
        raise ConfigError(
            "Tensor-parallel rank 0 has no data iterator: every pipeline stage and data-parallel "
            "rank loads there. Set is_distributed = True on the dataloaders provider."
        )
    return next(data_iterator)
