# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The weighted loss in the form Megatron's schedules expect: a sum, an int count and a report."""

import contextlib
import math
from typing import Any, Callable, Iterator, Mapping

import numpy as np
import torch
from megatron.core import parallel_state

from energon_ext.arguments import check_choice, check_integer
from energon_ext.batch.columns import DOCUMENT, PARTS, RESPONSE_MASK
from energon_ext.batch.packed_batch import PackedBatch
from energon_ext.errors import ConfigError, SampleError
from energon_ext.losses.distillation import Distillation
from energon_ext.losses.documents import document_columns, document_losses
from energon_ext.losses.sources import separate_weights
from energon_ext.losses.unified import (
    DENOMINATORS,
    check_ratio_limit,
    column_of,
    truncated_ratios,
)

#: Sum of the loss, count and report of a micro-batch.
Reported = tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]
LossFunc = Callable[[torch.Tensor], Reported]

#: ``(batch, log-probabilities of the labels [N]) -> loss at each position [N]``
PositionLosses = Callable[[PackedBatch, torch.Tensor], torch.Tensor]

#: Report of the whole batch; reports of single sources add ``/<source>``.
LOSS_KEY = "lm loss"
SOURCE_PREFIX = f"{LOSS_KEY}/"
DOCUMENTS_KEY = "document losses"  # of losses.document_losses: sums, and no mean

#: Reports that compare the model with its sampler or teacher.
COMPARED_KEYS = ("log_prob_gap", "ratios_truncated", "teacher_kl")

#: Count of a source without tokens, so that its mean is 0 and not NaN: Megatron-LM treats a NaN in
#: any report as a failed iteration. Too small to change a real count.
_NO_TOKENS = 1e-30


def make_loss_func(
    batch: PackedBatch,
    denominator: str = "weights",
    weight_scale: int = 1,
    ratio_limit: float | None = None,
    position_losses: PositionLosses | None = None,
) -> LossFunc:
    """Return Megatron's loss function for this micro-batch.

    It returns ``(weight_scale * sum_i w_i * nll_i, count, report)``. Megatron sums the first two
    over micro-batches and ranks and divides them, so with ``calculate_per_token_loss=True`` the
    loss of a step is exactly :func:`energon_ext.unified_loss` over the whole global batch.

    The count is an int32 tensor. Integer weights (0, 1, -1) are counted exactly. Fractional ones
    need a ``weight_scale`` with ``denominator="weights"``: ``sum_i |w_i|`` is then counted to the
    nearest ``1 / weight_scale``. The scale must be the same in all micro-batches, and the count of
    the global batch below 2**31. :func:`energon_ext.megatron.scale_router_losses` preserves the
    weight of MoE auxiliary losses, which Megatron divides by the same count.

    Args:
        batch: a batch returned by :func:`get_batch`.
        denominator: ``"weights"`` counts ``sum_i |w_i|``, ``"tokens"`` positions with ``w_i != 0``,
            ``"responses"`` those where the column ``response_mask`` is 1, also with ``w_i = 0``,
            ``"pairs"`` the pairs of answers in the batch, ``"documents"`` documents, each of which
            loses the mean of its trained labels (:func:`energon_ext.losses.document_mean`).
        weight_scale: integer >= 1.
        ratio_limit: if given, the sums (not the counts) use ``w_i * rho_i`` for ``w_i``, with the
            importance weights of :func:`energon_ext.losses.truncated_ratios`.
        position_losses: ``(batch, log_probs) -> losses``, both float32 [N], in place of ``w_i *
            nll_i``; for example :func:`energon_ext.losses.dpo_loss`, or a sum of
            :func:`energon_ext.losses.clipped_ratio_losses` and
            :func:`energon_ext.losses.reference_kl`. It runs on the last pipeline stage, with
            context parallelism on this rank's part of the batch.

    Returns:
        A function of the model's output, the loss at each position, [1, N]. Its report has float32
        ``[sum_i w_i * nll_i, D]``, where ``D`` is the count before scaling, under ``"lm loss"`` and
        for each source under ``"lm loss/<source>"``. For a batch with ``log_probs`` it also has,
        over the ``n`` positions with ``w_i != 0``, ``"log_prob_gap"``, ``[sum of log mu - log pi,
        n]``, and with a ``ratio_limit`` ``"ratios_truncated"``, ``[number that reached it, n]``;
        if it numbers its documents, the :data:`DOCUMENTS_KEY`.

    Raises:
        ConfigError: unknown ``denominator``, a ``weight_scale`` below 1 or too large, a
            ``ratio_limit`` for a batch without ``log_probs`` or with ``position_losses``, or
            ``"responses"`` for a batch without ``response_mask``, or ``"documents"`` for one whose
            task encoder has no ``document_means``.
        SampleError: fractional weights with ``weight_scale=1``, or ``"pairs"`` for a batch without
            ``pair_ids``.

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
    options = (denominator, weight_scale, ratio_limit, position_losses)
    check_loss_inputs(batch, *options)
    return loss_func_of(batch, *options)


def check_loss_inputs(
    batch: PackedBatch,
    denominator: str,
    weight_scale: int,
    ratio_limit: float | None,
    position_losses: PositionLosses | None,
) -> None:
    """Raise the errors of :func:`make_loss_func`; this waits for the GPU if the batch is on one."""
    check_choice("denominator", denominator, (*DENOMINATORS, "responses", "pairs", "documents"))
    if ratio_limit is not None and position_losses is not None:
        raise ConfigError(
            f"ratio_limit: {ratio_limit} found together with position_losses, which replace the "
            f"loss that it belongs to; leave one out."
        )
    check_ratio_limit(ratio_limit, batch.log_probs)
    batch, source_weights = separate_weights(batch)
    check_integer("weight_scale", weight_scale, 1)
    counted = _counts_on_host(batch, denominator)
    if source_weights is not None and denominator == "weights":
        counted = counted * source_weights.cpu().numpy()
    weight_scale *= _parts_in(denominator)
    if weight_scale == 1 and (counted != counted.round()).any():
        raise SampleError(
            "token_weights contain fractions, which Megatron cannot count: pass weight_scale (for "
            "example 1024, the same in every micro-batch) or denominator='tokens'."
        )
    if weight_scale > 1:
        _check_count(float(counted.sum()) * weight_scale, weight_scale)


def loss_func_of(
    batch: PackedBatch,
    denominator: str,
    weight_scale: int,
    ratio_limit: float | None,
    position_losses: PositionLosses | None,
    distillation: Distillation | None = None,
) -> LossFunc:
    """Return :func:`make_loss_func` of a batch that was checked before it moved to the GPU."""
    batch, source_weights = separate_weights(batch)
    weights, counted = batch.token_weights, _denominator_of(batch, denominator)
    shares = document_columns(batch)[0] if denominator == "documents" else None
    weight_scale *= _parts_in(denominator)

    def loss_func(output: torch.Tensor) -> Reported:
        nll, *divergences = output.float().view(1 if distillation is None else 2, -1)
        losses = weights * nll if position_losses is None else position_losses(batch, -nll)
        if distillation is not None:
            losses = weights * distillation.losses_of(batch, nll, *divergences)
        if ratio_limit is not None:
            assert batch.log_probs is not None  # checked earlier
            losses = losses * truncated_ratios(nll, batch.log_probs, ratio_limit)
        if shares is not None:
            losses = losses * shares
        weighted, total = losses, counted
        if source_weights is not None:
            weighted = losses * source_weights
            total = counted * source_weights if denominator == "weights" else counted
        num_tokens = (total.double().sum() * weight_scale).round().to(torch.int32)
        report = _report(batch, losses.detach(), counted)
        if source_weights is not None:
            report[LOSS_KEY] = _pair_of_sums(weighted.detach(), total)
        if batch.log_probs is not None:
            report |= _compare(nll.detach(), batch.log_probs, weights != 0, ratio_limit)
        if distillation is not None:
            taught = (weights != 0) & distillation.is_taught(batch)
            report["teacher_kl"] = _pair_of_sums(divergences[0].detach() * taught, taught.float())
        if DOCUMENT in batch.segments:
            report[DOCUMENTS_KEY] = document_losses(batch, -nll.detach())
        if _kept is not None:
            _kept.append({key: value for key, value in report.items() if key != LOSS_KEY})
            report = {LOSS_KEY: report[LOSS_KEY]}
        return weighted.sum() * weight_scale, num_tokens, report

    return loss_func


_kept: list[dict[str, torch.Tensor]] | None = None


@contextlib.contextmanager
def keep_reports() -> Iterator[list[dict[str, torch.Tensor]]]:
    """Make loss functions return only the report of the whole batch; yield a list of the others.

    Megatron-LM would reduce each report separately; :func:`means_on_device` reduces all at once.
    """
    global _kept
    kept: list[dict[str, torch.Tensor]] = []
    _kept = kept
    try:
        yield kept
    finally:
        _kept = None


def means_on_device(reports: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return the mean of each report over micro-batches and ranks, with a single reduction."""
    if not reports:
        return {}
    keys, sums = _sum(reports)
    return dict(zip(keys, sums[:, 0] / sums[:, 1]))


def _sum(reports: list[dict[str, torch.Tensor]]) -> tuple[list[str], torch.Tensor]:
    """Return keys and sums over micro-batches and data-parallel ranks: float32 [keys, 2]."""
    keys = [key for key in reports[0] if key != DOCUMENTS_KEY]
    sums = torch.stack([torch.stack([report[key] for key in keys]) for report in reports]).sum(0)
    torch.distributed.all_reduce(
        sums, group=parallel_state.get_data_parallel_group(with_context_parallel=True)
    )
    return keys, sums


def mean_losses(reports: list[dict[str, torch.Tensor]]) -> dict[str, Any]:
    """Return the mean loss of a step, overall and for each source that contributed to it.

    Args:
        reports: the schedule's result: one report per micro-batch on the last pipeline stage, none
            on the others.

    Returns:
        ``{"loss": float, "loss_by_source": {source: float}}``, means over all micro-batches and
        data-parallel ranks, plus ``log_prob_gap`` and ``ratios_truncated`` if reported; empty if
        ``reports`` is.
    """
    if not reports:
        return {}
    keys, sums = _sum(reports)
    means = {
        key.removeprefix(SOURCE_PREFIX): total / count
        for key, (total, count) in zip(keys, sums.tolist())
        if key in (LOSS_KEY, *COMPARED_KEYS) or count > 1e6 * _NO_TOKENS  # up to 1e6 micro-batches
    }
    compared = {key: means.pop(key) for key in COMPARED_KEYS if key in means}
    return {"loss": means.pop(LOSS_KEY), "loss_by_source": means, **compared}


def check_losses(losses: Mapping[str, Any], step: int) -> None:
    """Raise SampleError with every source's loss if a loss of :func:`mean_losses` is not finite.

    Only the last pipeline stage has losses: use :func:`energon_ext.state.together.on_all_ranks`.
    """
    by_source = losses.get("loss_by_source", {})
    if not all(map(math.isfinite, (losses.get("loss", 0.0), *by_source.values()))):
        listed = ", ".join(f"{source} {loss:.4g}" for source, loss in by_source.items())
        raise SampleError(
            f"Step {step}: the loss is {losses['loss']:.4g} ({listed}). The step was not taken and "
            f"nothing was saved; check its batches and the learning rate, then resume."
        )


def _parts_in(denominator: str) -> int:
    """Return in how many parts the units of a denominator are counted."""
    return PARTS if denominator == "documents" else 1


def _denominator_of(batch: PackedBatch, denominator: str) -> torch.Tensor:
    weights = batch.token_weights
    if denominator == "responses":
        return column_of(batch, RESPONSE_MASK, 'denominator="responses"')
    if denominator == "pairs":
        return batch.pair_starts()
    if denominator == "documents":
        return document_columns(batch)[1]
    return weights.abs() if denominator == "weights" else (weights != 0).float()


def _counts_on_host(batch: PackedBatch, denominator: str) -> np.ndarray:
    """Return values with the sum of :func:`_denominator_of`, whole numbers where its values are.

    NumPy computes them, as torch would wake all its threads in every micro-batch.
    """
    if denominator == "weights":
        return np.abs(batch.token_weights.cpu().numpy())
    if denominator == "tokens":
        return (batch.token_weights.cpu().numpy() != 0).astype(np.float32)
    if denominator == "pairs" and batch.pair_ids is not None:
        pairs = np.unique(batch.pair_ids.cpu().numpy())
        return (pairs >= 0).astype(np.float32)
    return _denominator_of(batch, denominator).cpu().numpy()  # a column, or the error


def _check_count(count: float, weight_scale: int) -> None:
    """Raise ConfigError if the count could overflow Megatron's int32 sum, which does not raise."""
    ranks = 1
    if parallel_state.is_initialized():
        ranks = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
    if count * ranks >= 2**31:
        raise ConfigError(
            f"weight_scale={weight_scale} counts {count:.0f} in one micro-batch, {ranks} times "
            f"that over data-parallel ranks; Megatron counts a global batch up to 2**31. Use a "
            f"smaller weight_scale or denominator='tokens'."
        )


def _report(
    batch: PackedBatch, losses: torch.Tensor, counted: torch.Tensor
) -> dict[str, torch.Tensor]:
    values = torch.stack([losses, counted], dim=1)
    source_of_position = batch.segment_sources() + 1  # padding becomes row 0
    sums = values.new_zeros(len(batch.sources) + 1, 2)
    sums.index_add_(0, source_of_position, values)
    reported = torch.cat([values.sum(0)[None], sums[1:]])
    reported[:, 1].clamp_(min=_NO_TOKENS)
    keys = (LOSS_KEY, *(SOURCE_PREFIX + source for source in batch.sources))
    return dict(zip(keys, reported))


def _pair_of_sums(losses: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    sums = torch.stack([losses.sum(), counted.sum()])
    sums[1].clamp_(min=_NO_TOKENS)
    return sums


def _compare(
    nll: torch.Tensor, log_probs: torch.Tensor, trained: torch.Tensor, ratio_limit: float | None
) -> dict[str, torch.Tensor]:
    count = trained.sum().float().clamp(min=_NO_TOKENS)
    gap = torch.where(trained, log_probs + nll, 0).sum()
    report = {"log_prob_gap": torch.stack([gap, count])}
    if ratio_limit is not None:
        reached = trained & (truncated_ratios(nll, log_probs, ratio_limit) >= ratio_limit)
        report["ratios_truncated"] = torch.stack([reached.sum().float(), count])
    return report
