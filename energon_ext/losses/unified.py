# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""One loss for pretraining, fine-tuning and policy gradients: a weighted mean over positions.

The weight of a position encodes the task: 1 trains it, 0 masks it, an advantage raises or lowers
its probability.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Sequence

import torch
import torch.nn.functional as F

from energon_ext.arguments import check_choice, check_number
from energon_ext.batch.columns import RESPONSE_MASK
from energon_ext.errors import ConfigError, SampleError

if TYPE_CHECKING:
    from energon_ext.batch.packed_batch import PackedBatch

#: Denominators of :func:`unified_loss`.
DENOMINATORS = ("weights", "tokens")


def unified_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    token_weights: torch.Tensor,
    denominator: str = "weights",
    *,
    sampler_log_probs: torch.Tensor | None = None,
    ratio_limit: float | None = None,
) -> torch.Tensor:
    """Return the weighted mean of the negative log-likelihood.

    ``sum_i w_i * nll_i / max(1, D)`` with ``nll_i = -log softmax(logits_i)[labels_i]``, in float32,
    where ``D`` is ``sum_i |w_i|`` (``"weights"``) or the number of positions with ``w_i != 0``
    (``"tokens"``, the mean over response tokens of GRPO). Positions with weight 0 are ignored and
    may have any logits and labels. Without other positions, loss and gradient are 0.

    Args:
        logits: float [N, V].
        labels: int64 [N], already shifted; in ``[0, V)`` wherever the weight is not 0.
        token_weights: float [N], finite.
        denominator: ``"weights"`` or ``"tokens"``.
        sampler_log_probs: float [N], log-probabilities of the labels under the sampling policy.
        ratio_limit: if given, every position counts ``w_i * rho_i * nll_i``, see
            :func:`truncated_ratios`; ``D`` does not change.

    Returns:
        float32 scalar.

    Raises:
        ConfigError: unknown ``denominator``, or a ``ratio_limit`` without ``sampler_log_probs``.
        SampleError: shapes do not match, a weight is not finite, or a label is out of range.

    Example:
        >>> logits = torch.zeros(2, 4)
        >>> round(unified_loss(logits, torch.tensor([1, 3]), torch.ones(2)).item(), 6)
        1.386294
        >>> unified_loss(logits, torch.tensor([1, 3]), torch.zeros(2)).item()
        0.0
    """
    words = logits.shape[1] if logits.dim() == 2 else None
    check_loss_inputs(logits, labels, token_weights, words, sampler_log_probs)
    trained = token_weights != 0
    # Select the other rows rather than multiply by 0: 0 * inf would be NaN.
    nll = F.cross_entropy(logits[trained].float(), labels[trained], reduction="none")
    sampled = None if sampler_log_probs is None else sampler_log_probs[trained]
    return weighted_mean(nll, token_weights[trained], denominator, sampled, ratio_limit)


def weighted_mean(
    nll: torch.Tensor,
    weights: torch.Tensor,
    denominator: str,
    sampler_log_probs: torch.Tensor | None,
    ratio_limit: float | None,
) -> torch.Tensor:
    """Return :func:`unified_loss` of the positions with a weight, given what each loses."""
    check_denominator(denominator)
    check_ratio_limit(ratio_limit, sampler_log_probs)
    weights = weights.float()
    total = weights.abs().sum().clamp(min=1) if denominator == "weights" else max(1, len(weights))
    if ratio_limit is not None:
        assert sampler_log_probs is not None
        nll = nll * truncated_ratios(nll, sampler_log_probs, ratio_limit)
    return (weights * nll).sum() / total


def truncated_ratios(
    nll: torch.Tensor, sampler_log_probs: torch.Tensor, limit: float
) -> torch.Tensor:
    """Return the truncated importance weights ``rho = min(limit, pi / mu)``, float32 [n].

    ``pi`` is the probability under the policy in training, ``mu`` under the sampling policy: an
    older one, or the same one in another engine. No gradient flows through the weights (truncated
    importance sampling, https://doi.org/10.1198/106186008X320456).

    Args:
        nll: float [n], ``-log pi``.
        sampler_log_probs: float [n], ``log mu``.
        limit: largest weight, > 0.

    Example:
        >>> nll, sampled = -torch.tensor([0.5, 0.2]).log(), torch.tensor([0.1, 0.4]).log()
        >>> [round(ratio, 4) for ratio in truncated_ratios(nll, sampled, 2.0).tolist()]
        [2.0, 0.5]
    """
    return (-nll.detach().float() - sampler_log_probs.float()).exp().clamp(max=limit)


def check_ratio_limit(limit: float | None, sampler_log_probs: torch.Tensor | None) -> None:
    """Raise ConfigError if a limit is not > 0, or comes without the sampler's log-probabilities."""
    if limit is None:
        return
    check_number("ratio_limit", limit, above_zero=True)
    if sampler_log_probs is None:
        raise ConfigError(f"ratio_limit: {limit} found, but no sampler_log_probs; give both.")


def group_advantages(
    rewards: torch.Tensor | Sequence[float],
    reward_clip: float | None = None,
    advantage_clip: float | None = None,
) -> torch.Tensor:
    """Return the advantages of one group of samples of the same prompt, float32 [g].

    ``(r - mean(r)) / (std(r) + 1e-8)`` with the unbiased standard deviation (GRPO,
    https://arxiv.org/abs/2402.03300). Equal rewards give zeros.

    Args:
        rewards: float [g], ``g >= 2``, finite; raises a SampleError otherwise.
        reward_clip: clips rewards to ``[-reward_clip, reward_clip]`` before anything else.
        advantage_clip: clips the advantages to ``[-advantage_clip, advantage_clip]``.

    Example:
        >>> group_advantages([1.0, 0.0, 0.0, 0.0]).tolist()
        [1.5, -0.5, -0.5, -0.5]
    """
    check_clips(reward_clip=reward_clip, advantage_clip=advantage_clip)
    # Double precision: the rounding of equal rewards such as 0.1 must stay far below the 1e-8.
    values = torch.as_tensor(rewards, dtype=torch.float64)
    if values.dim() != 1 or len(values) < 2:
        raise SampleError(
            "group_advantages needs the rewards of at least two samples, [g] with g >= 2, "
            f"got shape {list(values.shape)}."
        )
    if not bool(torch.isfinite(values).all()):
        raise SampleError(f"Rewards must be finite, got {values.tolist()}.")
    values = clip(values, reward_clip)
    advantages = (values - values.mean()) / (values.std(unbiased=True) + 1e-8)
    return clip(advantages, advantage_clip).float()


def clipped_ratio_losses(
    batch: PackedBatch,
    log_probs: torch.Tensor,
    clip: float = 0.2,
    *,
    clip_high: float | None = None,
    dual_clip: float | None = None,
    old_log_probs: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return PPO's loss at each position: float32 [N] (https://arxiv.org/abs/1707.06347).

    ``-min(w * rho, w * min(max(rho, 1 - clip), 1 + clip_high))`` with the advantage ``w`` of
    ``token_weights`` and ``rho = exp(log_probs - old_log_probs)``; 0 where ``w`` is 0. The gradient
    vanishes where the ratio has moved further than the clip in the direction of the advantage.

    Args:
        log_probs: float [N], log-probabilities of the labels under the policy in training.
        clip, clip_high: how far the ratio may move below and above 1; ``clip_high`` is ``clip``
            if None.
        dual_clip: if given, the loss of a negative advantage is at most ``-w * dual_clip``
            (https://arxiv.org/abs/1912.09729).
        old_log_probs: float [N], of the policy that the ratio refers to, such as a column of the
            batch; by default the sampler's, ``batch.log_probs``.

    Raises:
        ConfigError: a clip is out of range, or there are no old log-probabilities.

    Example:
        >>> from types import SimpleNamespace
        >>> batch = SimpleNamespace(
        ...     token_weights=torch.tensor([1.0, 1.0, -1.0]), log_probs=torch.zeros(3), columns={})
        >>> ratios = torch.tensor([1.5, 0.5, 0.5])
        >>> [round(loss, 4) for loss in clipped_ratio_losses(batch, ratios.log()).tolist()]
        [-1.2, -0.5, 0.8]
    """
    high = clip if clip_high is None else clip_high
    check_number("clip", clip, most=1, above_zero=True)
    check_number("clip_high", high, above_zero=True)
    old = batch.log_probs if old_log_probs is None else old_log_probs
    if old is None:
        raise ConfigError("clipped_ratio_losses: the batch has no log_probs; give old_log_probs.")
    weights = batch.token_weights.float()
    # Where nothing is trained the ratio is 1, so that no infinity meets a weight of 0.
    ratio = torch.where(weights != 0, log_probs.float() - old.float(), 0.0).exp()
    losses = -torch.minimum(weights * ratio, weights * ratio.clamp(1 - clip, 1 + high))
    if dual_clip is not None:
        check_number("dual_clip", dual_clip, above_zero=True)
        losses = torch.where(weights < 0, torch.minimum(losses, -weights * dual_clip), losses)
    return losses


def reference_kl(
    batch: PackedBatch,
    log_probs: torch.Tensor,
    estimator: str = "k3",
    *,
    reference: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return an estimate of the divergence from a reference policy at each position: float32 [N].

    With ``d = log_probs - reference``, ``k1`` is ``d`` and ``k3`` is ``exp(-d) - 1 + d``, which is
    never negative (http://joschu.net/blog/kl-approx.html). 0 outside the tokens to train on: where
    the column ``response_mask`` of the batch is 0.

    Args:
        log_probs: float [N], log-probabilities of the labels under the policy in training.
        estimator: ``k1`` or ``k3``.
        reference: float [N], those of the reference; by default the column ``ref_log_probs``.

    Raises:
        ConfigError: an unknown estimator, or a column is missing.

    Example:
        >>> from types import SimpleNamespace
        >>> columns = {"response_mask": torch.tensor([0.0, 1.0]), "ref_log_probs": torch.zeros(2)}
        >>> batch = SimpleNamespace(columns=columns)
        >>> [round(kl, 4) for kl in reference_kl(batch, torch.tensor([1.0, -1.0])).tolist()]
        [0.0, 0.7183]
    """
    check_choice("estimator", estimator, ("k1", "k3"))
    mask = column_of(batch, RESPONSE_MASK, "reference_kl") != 0
    if reference is None:
        reference = column_of(batch, "ref_log_probs", "reference_kl")
    distance = torch.where(mask, log_probs.float() - reference.float(), 0.0)
    return distance if estimator == "k1" else (-distance).exp() - 1 + distance


def column_of(batch: PackedBatch, name: str, owner: str) -> torch.Tensor:
    """Return a column of a batch; raise ConfigError if it has none of this name."""
    if name not in batch.columns:
        raise ConfigError(
            f"{owner}: the batch has the columns {[*batch.columns]}, {name} is needed; return it "
            f"in the columns of every ScoredGroup."
        )
    return batch.columns[name]


def check_denominator(denominator: str) -> None:
    """Raise ConfigError unless ``denominator`` is one of :data:`DENOMINATORS`."""
    check_choice("denominator", denominator, DENOMINATORS)


def check_loss_inputs(
    values: torch.Tensor,
    labels: torch.Tensor,
    token_weights: torch.Tensor,
    words: int | None,
    sampler_log_probs: torch.Tensor | None = None,
) -> None:
    """Raise SampleError if the arguments of a loss do not match.

    Args:
        values: logits or hidden states, [N, ...].
        words: size of the vocabulary; None if it is unknown.
    """
    if values.dim() != 2:
        raise SampleError(
            f"logits must be [N, V], and hidden states [N, H], got {list(values.shape)}."
        )
    positions = len(values)
    of_positions = {"labels": labels, "token_weights": token_weights}
    if sampler_log_probs is not None:
        of_positions["sampler_log_probs"] = sampler_log_probs
    for name, tensor in of_positions.items():
        if tuple(tensor.shape) != (positions,):
            raise SampleError(
                f"{name} must be [{positions}] like the logits, got {list(tensor.shape)}."
            )
    if labels.dtype != torch.int64:
        raise SampleError(f"labels must be torch.int64, got {labels.dtype}.")
    if not bool(torch.isfinite(token_weights).all()):
        raise SampleError("token_weights must be finite, got NaN or infinity.")
    check_labels(labels[token_weights != 0], words, " where the weight is not 0")


def check_labels(labels: torch.Tensor, words: int | None, where: str = "") -> None:
    """Raise SampleError for a label that is no word of a vocabulary.

    torch would give the label -100 a loss of 0.

    Args:
        words: size of the vocabulary; None if it is unknown.
    """
    if not len(labels):
        return
    lowest, highest = int(labels.min()), int(labels.max())
    if lowest < 0 or (words is not None and highest >= words):
        needed = "at least 0" if words is None else f"in [0, {words})"
        raise SampleError(f"labels must be {needed}{where}, got {lowest}..{highest}.")


def check_clips(**clips: float | None) -> None:
    """Raise ConfigError unless each is a number > 0 or None."""
    for name, value in clips.items():
        if value is not None and not value > 0:
            raise ConfigError(f"{name}: {value!r} found, a number > 0 or None is needed.")


def clip(values: torch.Tensor, limit: float | None) -> torch.Tensor:
    """Clip values to ``[-limit, limit]``; None for no limit."""
    return values if limit is None else values.clamp(-limit, limit)
