# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""One loss for pretraining, fine-tuning and policy gradients: a weighted mean over positions.

The weight of a position encodes the task: 1 trains it, 0 masks it, an advantage raises or lowers
its probability.
"""

from __future__ import annotations

from typing import Sequence

import torch
import torch.nn.functional as F

from energon_ext.arguments import check_choice, check_number
from energon_ext.errors import ConfigError, SampleError

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
    check_denominator(denominator)
    _check_loss_inputs(logits, labels, token_weights)
    trained = token_weights != 0
    weights = token_weights[trained].float()
    # Select the other rows rather than multiply by 0: 0 * inf would be NaN.
    nll = F.cross_entropy(logits[trained].float(), labels[trained], reduction="none")
    total = weights.abs().sum().clamp(min=1) if denominator == "weights" else max(1, len(weights))
    if ratio_limit is not None:
        check_ratio_limit(ratio_limit, sampler_log_probs)
        assert sampler_log_probs is not None
        nll = nll * truncated_ratios(nll, sampler_log_probs[trained], ratio_limit)
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
    for name, clip in (("reward_clip", reward_clip), ("advantage_clip", advantage_clip)):
        if clip is not None and not clip > 0:
            raise ConfigError(f"{name}: {clip!r} found, a number > 0 or None is needed.")
    # Double precision: the rounding of equal rewards such as 0.1 must stay far below the 1e-8.
    values = torch.as_tensor(rewards, dtype=torch.float64)
    if values.dim() != 1 or len(values) < 2:
        raise SampleError(
            "group_advantages needs the rewards of at least two samples, [g] with g >= 2, "
            f"got shape {list(values.shape)}."
        )
    if not bool(torch.isfinite(values).all()):
        raise SampleError(f"Rewards must be finite, got {values.tolist()}.")
    values = _clip(values, reward_clip)
    advantages = (values - values.mean()) / (values.std(unbiased=True) + 1e-8)
    return _clip(advantages, advantage_clip).float()


def check_denominator(denominator: str) -> None:
    """Raise ConfigError unless ``denominator`` is one of :data:`DENOMINATORS`."""
    check_choice("denominator", denominator, DENOMINATORS)


def _check_loss_inputs(
    logits: torch.Tensor, labels: torch.Tensor, token_weights: torch.Tensor
) -> None:
    if logits.dim() != 2:
        raise SampleError(f"logits must be [N, V], got {list(logits.shape)}.")
    positions, vocabulary = logits.shape
    for name, tensor in (("labels", labels), ("token_weights", token_weights)):
        if tuple(tensor.shape) != (positions,):
            raise SampleError(
                f"{name} must be [{positions}] like the logits, got {list(tensor.shape)}."
            )
    if not bool(torch.isfinite(token_weights).all()):
        raise SampleError("token_weights must be finite, got NaN or infinity.")
    trained_labels = labels[token_weights != 0]
    if len(trained_labels) and not (
        int(trained_labels.min()) >= 0 and int(trained_labels.max()) < vocabulary
    ):
        raise SampleError(
            f"labels must be in [0, {vocabulary}) where the weight is not 0, "
            f"got {int(trained_labels.min())}..{int(trained_labels.max())}."
        )


def _clip(values: torch.Tensor, limit: float | None) -> torch.Tensor:
    return values if limit is None else values.clamp(-limit, limit)
