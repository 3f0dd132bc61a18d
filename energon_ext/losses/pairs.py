# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Losses on pairs of answers to one prompt, of which one is preferred."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from energon_ext.arguments import check_choice, check_number
from energon_ext.errors import ConfigError
from energon_ext.losses.sources import separate_weights

if TYPE_CHECKING:
    from energon_ext.batch.packed_batch import PackedBatch

#: The column of a batch with the log-probabilities of the labels under a reference.
REF_LOG_PROBS = "ref_log_probs"

SIGMOID, IPO = "sigmoid", "ipo"


def dpo_loss(
    batch: PackedBatch,
    log_probs: torch.Tensor,
    beta: float = 0.1,
    *,
    kind: str = SIGMOID,
    label_smoothing: float = 0.0,
    reference: torch.Tensor | None = None,
    group: Any = None,
) -> torch.Tensor:
    """Return the loss of each pair at its first position, 0 elsewhere: float32 [N].

    With the margin ``m`` of :func:`preference_margins`, ``sigmoid`` is ``-log sigmoid(beta * m)``
    (DPO, https://arxiv.org/abs/2305.18290); a ``label_smoothing`` ``e`` takes the share ``e`` of
    the preferences as wrong: ``-(1 - e) log sigmoid(beta * m) - e log sigmoid(-beta * m)``. ``ipo``
    is ``(m - 1 / (2 beta))**2`` with the means of the answers in place of their sums
    (https://arxiv.org/abs/2310.12036). With ``denominator="pairs"`` the loss of a step is the mean
    over the pairs of the global batch.

    Args:
        log_probs: float [N], log-probabilities of the labels under the policy in training.
        beta: > 0; the larger, the nearer the policy stays to the reference.
        kind: ``sigmoid`` or ``ipo``.
        label_smoothing: from 0 to 0.5, for ``sigmoid``.
        reference, group: see :func:`preference_margins`.

    Raises:
        ConfigError: an option is out of range, or the batch has no reference.
        SampleError: the batch has no pairs.

    Example:
        >>> import numpy as np
        >>> from energon_ext.batch.collate import BatchAssembler
        >>> from energon_ext.batch.rows import Row
        >>> weights = [np.array([0, 1.0]), np.array([0, -1.0])]
        >>> row = Row([np.array([5, 6]), np.array([5, 7])], label_weights=weights, pairs=[0, 0])
        >>> batch = BatchAssembler(4)([row], sources=[""])
        >>> log_probs = torch.tensor([-1.0, 0.0, -3.0, 0.0])
        >>> loss = dpo_loss(batch, log_probs, beta=0.5, reference=torch.zeros(4))
        >>> [round(value, 4) for value in loss.tolist()]
        [0.3133, 0.0, 0.0, 0.0]
    """
    check_choice("kind", kind, (SIGMOID, IPO))
    check_number("beta", beta, above_zero=True)
    check_number("label_smoothing", label_smoothing, most=0.5)
    if label_smoothing and kind == IPO:
        raise ConfigError("label_smoothing: has no meaning for kind 'ipo'; remove it.")
    batch, source_weights = separate_weights(batch)
    margins = preference_margins(
        batch, log_probs, by_mean=kind == IPO, reference=reference, group=group
    )
    if kind == IPO:
        losses = (margins - 1 / (2 * beta)) ** 2
    else:
        losses = -(1 - label_smoothing) * F.logsigmoid(beta * margins)
        losses = losses - label_smoothing * F.logsigmoid(-beta * margins)
    losses = batch.pair_starts() * losses[_pair_of_position(batch)]
    return losses if source_weights is None else losses * source_weights


def preference_margins(
    batch: PackedBatch,
    log_probs: torch.Tensor,
    *,
    by_mean: bool = False,
    reference: torch.Tensor | None = None,
    group: Any = None,
) -> torch.Tensor:
    """Return how much more than the reference the policy prefers the chosen answer, per pair.

    The sum of ``w_i * (log_probs_i - reference_i)`` over both answers of a pair, with the weights
    of the batch: positive on the chosen answer, negative on the rejected one.

    Args:
        log_probs: float [N], log-probabilities of the labels under the policy.
        by_mean: divide the part of each answer by its sum of ``|w_i|``.
        reference: float [N], those of the reference; by default the column ``ref_log_probs``. Zeros
            give the margin of the policy alone.
        group: context-parallel ranks, each with its part of the batch; None for the whole batch.

    Returns:
        float32 [n], by the ids of ``pair_ids``; 0 from the number of pairs on.
    """
    batch, _ = separate_weights(batch)
    if reference is None:
        if REF_LOG_PROBS not in batch.columns:
            raise ConfigError(
                f"The batch has the columns {[*batch.columns]}, {REF_LOG_PROBS} is needed; name "
                f"the `reference` of the PreferenceTaskEncoder, or give the log-probabilities."
            )
        reference = batch.columns[REF_LOG_PROBS]
    weights = batch.token_weights.float()
    # Select rather than multiply by 0: where nothing is trained, values may be infinite.
    ratios = torch.where(weights != 0, log_probs.float() - reference.float(), 0.0)
    # Two sums per pair: of the rejected answer, whose weights are negative, and the chosen one.
    places = 2 * _pair_of_position(batch) + (weights > 0)
    sums = ratios.new_zeros(2, 2 * batch.most_pairs)
    sums = sums.index_add(1, places, torch.stack([weights * ratios, weights.abs()]))
    if group is not None:
        sums = _SumOverRanks.apply(sums, group)
    parts, sizes = sums.view(2, -1, 2)
    return (parts / sizes.clamp(min=1e-30) if by_mean else parts).sum(1)


def _pair_of_position(batch: PackedBatch) -> torch.Tensor:
    """Return the pair of each position, int64 [N]; 0 for none, where weights are 0."""
    if batch.pair_ids is None:
        return batch.pair_starts().long()  # raises
    return (
        batch.pair_ids.clamp(min=0)
        .long()
        .repeat_interleave(batch.segment_lengths().long(), output_size=batch.num_tokens)
    )


class _SumOverRanks(torch.autograd.Function):
    """Sum over the ranks of a group; the gradient is the sum of the gradients of all ranks."""

    @staticmethod
    def forward(context: Any, values: torch.Tensor, group: Any) -> torch.Tensor:
        context.group = group
        values = values.clone()
        dist.all_reduce(values, group=group)
        return values

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=context.group)
        return gradient, None
