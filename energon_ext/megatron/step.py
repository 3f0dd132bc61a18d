# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""One training step's data, forward pass and loss, as Megatron's schedules call them.

1. :func:`get_batch`: tensor-parallel rank 0 of every pipeline stage draws a ``PackedBatch`` (the
   loader is deterministic, so all stages hold the same), the other ranks receive it; each
   context-parallel rank keeps its slice.
2. :func:`build_packed_seq_params`: the segment ends, for attention on every stage.
3. :func:`make_loss_func`: the weighted loss as Megatron wants it, a sum and an integer count.

:func:`forward_step` is the three in a row, ready for ``get_forward_backward_func()``.
"""

from __future__ import annotations

import math
from typing import Any, Callable, Iterator, Mapping

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams

from energon_ext.batch.packed_batch import PackedBatch
from energon_ext.errors import ConfigError, SampleError
from energon_ext.losses import check_denominator
from energon_ext.megatron.broadcast import broadcast_batch
from energon_ext.megatron.context_parallel import (
    ContextParallelSlice,
    attention_ends,
    slice_for_context_parallel,
)
from energon_ext.megatron.moe import check_router_losses, padding_mask_for
from energon_ext.megatron.mtp import loss_mask_for

LossFunc = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]]

#: Report of the whole batch; what stands before the name of a source in its own.
LOSS_KEY = "lm loss"
SOURCE_PREFIX = f"{LOSS_KEY}/"

#: Count of a source without tokens, whose mean is then 0 and not NaN: Megatron-LM takes a NaN in
#: any report for a failed iteration. Added to a real count it changes nothing.
_NO_TOKENS = 1e-30


def get_batch(data_iterator: Iterator[PackedBatch] | None) -> PackedBatch:
    """Return this micro-batch on this rank's device, the same on all ranks of a model replica.

    With context parallelism each rank gets its slice of it, see
    :mod:`energon_ext.megatron.context_parallel`.

    Args:
        data_iterator: the loader on tensor-parallel rank 0 of every pipeline stage; not looked at
            on other ranks.

    Raises:
        ConfigError: tensor-parallel rank 0 has no iterator, or a segment is not aligned for
            context parallelism.
        SampleError: tensor-parallel rank 0 failed to draw; there the original error is raised.
        StopIteration: the iterator ended.
    """
    batch = _whole_batch(data_iterator, _device())
    size = parallel_state.get_context_parallel_world_size()
    if size == 1:
        return batch
    return slice_for_context_parallel(batch, size, parallel_state.get_context_parallel_rank())


def _whole_batch(data_iterator: Iterator[PackedBatch] | None, device: torch.device) -> PackedBatch:
    if parallel_state.get_tensor_model_parallel_world_size() == 1:
        return _draw(data_iterator).to(device)
    return broadcast_batch(
        lambda: _draw(data_iterator),
        source_rank=parallel_state.get_tensor_model_parallel_src_rank(),
        group=parallel_state.get_tensor_model_parallel_group(),
        device=device,
    )


def build_packed_seq_params(batch: PackedBatch) -> PackedSeqParams:
    """Return Megatron's description of the segments; padding is a segment of its own.

    Of a slice for context parallelism it describes the whole batch: which of it is on which rank,
    attention and RoPE work out themselves.

    Example:
        >>> import numpy as np
        >>> from energon_ext.batch.collate import BatchAssembler
        >>> from energon_ext.batch.rows import Row
        >>> row = Row([np.array([5, 6, 7]), np.array([8])])
        >>> params = build_packed_seq_params(BatchAssembler(4)([row, row], sources=[""]))
        >>> params.cu_seqlens_q.tolist(), params.max_seqlen_q
        ([0, 3, 4, 7, 8], 3)
    """
    if isinstance(batch, ContextParallelSlice):
        assert batch.whole is not None  # it was cut from one
        ends, padded_ends = attention_ends(batch.whole)
        longest = int(padded_ends.diff().max())
        return PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=ends,
            cu_seqlens_kv=ends,
            cu_seqlens_q_padded=padded_ends,
            cu_seqlens_kv_padded=padded_ends,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            **_gaps(True),
        )
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=batch.cu_seqlens,
        cu_seqlens_kv=batch.cu_seqlens,
        max_seqlen_q=batch.max_seqlen,
        max_seqlen_kv=batch.max_seqlen,
        **_gaps(False),
    )


def _gaps(are_between: bool) -> dict[str, bool]:
    """Whether there are any between segments; else Transformer Engine looks, in every layer."""
    knows = "pad_between_seqs" in PackedSeqParams.__dataclass_fields__  # megatron-core >= 0.19
    return {"pad_between_seqs": are_between} if knows else {}


def forward_step(
    data_iterator: Iterator[PackedBatch] | None,
    model: torch.nn.Module,
    *,
    denominator: str = "weights",
    weight_scale: int = 1,
) -> tuple[torch.Tensor, LossFunc]:
    """Run one micro-batch through the model, as Megatron's schedules call it.

    The batch is one packed sequence: give the schedule ``micro_batch_size=1`` and
    ``seq_length=rows * seq_len``. For other arguments than the defaults pass
    ``functools.partial(forward_step, denominator="tokens")``.

    Args:
        data_iterator: see :func:`get_batch`.
        model: a ``GPTModel``, wrapped or not.
        denominator: see :func:`make_loss_func`.
        weight_scale: see :func:`make_loss_func`.

    Returns:
        The model's output (on the last stage the loss of each position, [1, N]) and the loss
        function.

    Raises:
        ConfigError: the routers of the model were not told of ``weight_scale``, see
            :func:`energon_ext.megatron.scale_router_losses`; or see
            :func:`energon_ext.megatron.mtp.loss_mask_for`.
    """
    check_router_losses(model, weight_scale)
    batch = get_batch(data_iterator)
    # Made before the forward pass is queued: looking at the weights waits for the device.
    loss_func = make_loss_func(batch, denominator, weight_scale)
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


def make_loss_func(
    batch: PackedBatch, denominator: str = "weights", weight_scale: int = 1
) -> LossFunc:
    """Return Megatron's loss function of this micro-batch.

    It returns ``(weight_scale * sum_i w_i * nll_i, num_tokens, report)``. Megatron sums the first
    and the second over micro-batches, data-parallel ranks and pipeline stages and divides, so under
    ``calculate_per_token_loss=True`` the step has exactly the loss of
    :func:`energon_ext.unified_loss` over the whole global batch.

    The count is an int32 tensor. Whole weights (0, 1, -1) count themselves. Others need, with
    ``denominator="weights"``, a ``weight_scale``: ``sum_i |w_i|`` of the micro-batch is then
    counted to the nearest ``1 / weight_scale``. The scale must be the same in all micro-batches,
    and the count of the global batch below 2**31; a micro-batch that alone, times the data-parallel
    ranks, reaches that is refused. It would divide the auxiliary losses of MoE
    routers as well: :func:`energon_ext.megatron.scale_router_losses` keeps their weight.

    Args:
        batch: what :func:`get_batch` returned.
        denominator: ``"weights"`` counts ``sum_i |w_i|``, ``"tokens"`` positions of ``w_i != 0``.
        weight_scale: integer >= 1.

    Returns:
        A function of the model's output (loss of each position, [1, N]) that returns the scaled
        sum, the count (int32), and the report: float32 ``[sum_i w_i * nll_i, D]`` with ``D``, the
        count before scaling, under ``"lm loss"`` and, for each source of ``batch.sources``, under
        ``"lm loss/<source>"``.

    Raises:
        ConfigError: unknown ``denominator``, or a ``weight_scale`` below 1 or too large.
        SampleError: weights that are not whole are to be counted at ``weight_scale=1``.

    Example:
        >>> import numpy as np
        >>> from energon_ext.batch.collate import BatchAssembler
        >>> from energon_ext.batch.rows import Row
        >>> label_weights = np.array([0, 1, -1])
        >>> row = Row([np.array([5, 6, 7])], source="web", label_weights=[label_weights])
        >>> loss_func = make_loss_func(BatchAssembler(3)([row], sources=["web"]))
        >>> loss, num_tokens, report = loss_func(torch.tensor([[2.0, 0.5, 9.0]]))
        >>> loss.item(), num_tokens.item(), report["lm loss/web"].tolist()
        (1.5, 2, [1.5, 2.0])
    """
    check_denominator(denominator)
    if weight_scale < 1:
        raise ConfigError(f"weight_scale must be an integer >= 1, got {weight_scale!r}.")
    weights = batch.token_weights
    counted = weights.abs() if denominator == "weights" else (weights != 0).float()
    if weight_scale == 1 and bool((counted != counted.round()).any()):
        raise SampleError(
            "token_weights hold fractions, which Megatron cannot count: pass weight_scale (for "
            "example 1024, the same in every micro-batch) or denominator='tokens'."
        )
    if weight_scale > 1:
        _check_count(float(counted.sum()) * weight_scale, weight_scale)

    def loss_func(
        output: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        losses = weights * output.float().view(-1)
        loss_sum = losses.sum() * weight_scale
        num_tokens = (counted.double().sum() * weight_scale).round().to(torch.int32)
        return loss_sum, num_tokens, _report(batch, losses.detach(), counted)

    return loss_func


def mean_losses(reports: list[dict[str, torch.Tensor]]) -> dict[str, Any]:
    """Return the mean loss of a step, and that of each source that took part in it.

    Args:
        reports: what the schedule returned: one report a micro-batch on the last pipeline stage,
            nothing on the others.

    Returns:
        ``{"loss": float, "loss_by_source": {source: float}}``, means over all micro-batches and
        data-parallel ranks; empty where ``reports`` is.
    """
    if not reports:
        return {}
    sums = torch.stack([torch.stack(list(report.values())) for report in reports]).sum(0)
    torch.distributed.all_reduce(
        sums, group=parallel_state.get_data_parallel_group(with_context_parallel=True)
    )
    means = {
        key.removeprefix(SOURCE_PREFIX): total / count
        for key, (total, count) in zip(reports[0], sums.tolist())
        if key == LOSS_KEY or count > 1e6 * _NO_TOKENS  # of so many micro-batches
    }
    return {"loss": means.pop(LOSS_KEY), "loss_by_source": means}


def check_losses(losses: Mapping[str, Any], step: int) -> None:
    """Refuse to take a step whose loss (of :func:`mean_losses`) is no number.

    Only the last pipeline stage has losses: use :func:`energon_ext.state.together.on_all_ranks`.

    Raises:
        SampleError: names the step and the sources of its batches.

    Example:
        >>> check_losses({"loss": math.nan, "loss_by_source": {"web": math.nan, "code": 2.5}}, 7)
        Traceback (most recent call last):
        energon_ext.errors.SampleError: Step 7: the loss is nan (web nan, code 2.5). The step was \
not taken, nothing of it is saved; look at its batches and at the learning rate, then resume.
    """
    by_source = losses.get("loss_by_source", {})
    if not all(map(math.isfinite, (losses.get("loss", 0.0), *by_source.values()))):
        listed = ", ".join(f"{source} {loss:.4g}" for source, loss in by_source.items())
        raise SampleError(
            f"Step {step}: the loss is {losses['loss']:.4g} ({listed}). The step was not taken, "
            f"nothing of it is saved; look at its batches and at the learning rate, then resume."
        )


def _check_count(count: float, weight_scale: int) -> None:
    """Megatron sums counts in int32, and scales nothing when the sum has wrapped around."""
    alone = not parallel_state.is_initialized()
    ranks = 1 if alone else parallel_state.get_data_parallel_world_size(with_context_parallel=True)
    if count * ranks >= 2**31:
        raise ConfigError(
            f"weight_scale={weight_scale} counts {count:.0f} in one micro-batch, over data-"
            f"parallel ranks {ranks} times that; Megatron counts a global batch up to 2**31. Use a "
            "smaller weight_scale or denominator='tokens'."
        )


def _report(
    batch: PackedBatch, losses: torch.Tensor, counted: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Sum loss and count over all positions and over those of each source."""
    values = torch.stack([losses, counted], dim=1)
    source_of_position = batch.segment_sources() + 1  # padding becomes row 0
    sums = values.new_zeros(len(batch.sources) + 1, 2)
    sums.index_add_(0, source_of_position, values)
    report = {LOSS_KEY: values.sum(0)}
    for index, source in enumerate(batch.sources):
        report[SOURCE_PREFIX + source] = sums[index + 1]
    for _, count in report.values():
        count.clamp_(min=_NO_TOKENS)
    return report


def _draw(data_iterator: Iterator[PackedBatch] | None) -> PackedBatch:
    if data_iterator is None:
        raise ConfigError(
            "Tensor-parallel rank 0 has no data iterator: every pipeline stage and data-parallel "
            "rank loads there. Set is_distributed = True on the dataloaders provider."
        )
    return next(data_iterator)


def _device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
