# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""One training step's data, forward pass and loss, as Megatron's schedules call them."""

from typing import Any, Callable, Iterator

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams

from energon_ext.batch.packed_batch import PackedBatch
from energon_ext.errors import ConfigError, SampleError
from energon_ext.megatron.context_parallel import ContextParallelSlice, slice_for_context_parallel
from energon_ext.megatron.loss import LossFunc, make_loss_func
from energon_ext.megatron.moe import check_router_losses, padding_mask_for
from energon_ext.megatron.mtp import loss_mask_for
from energon_ext.state.together import collective_device


def get_batch(data_iterator: Iterator[PackedBatch] | None) -> PackedBatch:
    """Return this micro-batch on this rank's device, the same on all ranks of a model replica.

    Tensor-parallel rank 0 of every pipeline stage draws it; the loader is deterministic, so all
    stages have the same. With context parallelism each rank gets its
    :func:`~energon_ext.megatron.slice_for_context_parallel`.

    Raises:
        ConfigError: tensor-parallel rank 0 has no iterator, or a segment is not aligned for
            context parallelism.
        SampleError: tensor-parallel rank 0 failed to draw; there the original error is raised.
        StopIteration: the iterator ended.
    """
    device = collective_device()
    if parallel_state.get_tensor_model_parallel_world_size() == 1:
        batch = _draw(data_iterator).to(device)
    else:
        batch = _broadcast(lambda: _draw(data_iterator), device)
    size = parallel_state.get_context_parallel_world_size()
    if size == 1:
        return batch
    return slice_for_context_parallel(batch, size, parallel_state.get_context_parallel_rank())


def build_packed_seq_params(batch: PackedBatch) -> PackedSeqParams:
    """Return Megatron's description of the segments; padding is a segment of its own.

    Of a slice for context parallelism it describes the aligned segments of the whole batch, padding
    included: padding follows its document, so causal attention never looks at it.

    Example:
        >>> import numpy as np
        >>> from energon_ext.batch.collate import BatchAssembler
        >>> from energon_ext.batch.rows import Row
        >>> row = Row([np.array([5, 6, 7]), np.array([8])])
        >>> params = build_packed_seq_params(BatchAssembler(4)([row, row], sources=[""]))
        >>> params.cu_seqlens_q.tolist(), params.max_seqlen_q
        ([0, 3, 4, 7, 8], 3)
    """
    ends, longest = batch.cu_seqlens, batch.max_seqlen
    more: dict[str, Any] = {}
    if isinstance(batch, ContextParallelSlice):
        assert batch.aligned_ends is not None  # a default, because those of PackedBatch have one
        ends = batch.aligned_ends
        longest = int(ends.diff().max())
        # The same: told of gaps, Transformer Engine does without its fast kernels.
        more = {"cu_seqlens_q_padded": ends, "cu_seqlens_kv_padded": ends}
    if "pad_between_seqs" in PackedSeqParams.__dataclass_fields__:  # megatron-core >= 0.19
        # Not told, Transformer Engine looks for gaps between segments, in every layer.
        more["pad_between_seqs"] = False
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        **more,
    )


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
    batch = get_batch(data_iterator)
    # Made before the forward pass is queued: looking at the weights waits for the device.
    loss_func = make_loss_func(batch, denominator, weight_scale, ratio_limit)
    output = model(
        batch.tokens[None],
        batch.position_ids[None],
        None,  # attention mask: the segments say it all
        labels=batch.labels[None],
        packed_seq_params=build_packed_seq_params(batch),
        **padding_mask_for(model, batch),
        **loss_mask_for(model, batch, weight_scale),
    )
    return output, loss_func


def _draw(data_iterator: Iterator[PackedBatch] | None) -> PackedBatch:
    if data_iterator is None:
        raise ConfigError(
            "Tensor-parallel rank 0 has no data iterator: every pipeline stage and data-parallel "
            "rank loads there. Set is_distributed = True on the dataloaders provider."
        )
    return next(data_iterator)


def _broadcast(draw: Callable[[], PackedBatch], device: torch.device) -> PackedBatch:
    """Draw on the first tensor-parallel rank; the others get what lies where, and the bytes."""
    group = parallel_state.get_tensor_model_parallel_group()
    source = parallel_state.get_tensor_model_parallel_src_rank()
    is_source = dist.get_rank() == source
    message: list[Any] = [None]
    try:
        if is_source:
            batch = draw()
            buffer = batch.as_buffer().to(device)
            message = [(buffer.numel(), batch.layout(), batch.sources, batch.max_seqlen)]
    finally:
        # Also when the draw failed: the others wait for this message.
        dist.broadcast_object_list(message, source, group=group, device=device)
    if message[0] is None:
        raise SampleError(f"Rank {source} failed to draw a batch; its own error says why.")
    num_bytes, *fields = message[0]
    if not is_source:
        buffer = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    dist.broadcast(buffer, source, group=group)
    return PackedBatch.from_buffer(buffer, *fields)
