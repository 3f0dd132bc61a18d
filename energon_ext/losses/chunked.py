# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Losses from hidden states, a chunk of positions at a time.

The logits of a whole batch are its largest tensor: positions times words. Here only those of one
chunk exist at any time, as the backward pass computes the logits of each chunk again.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from energon_ext.arguments import check_integer
from energon_ext.losses.unified import check_loss_inputs, weighted_mean

#: Positions of a chunk, unless the caller chooses.
CHUNK = 1024

#: The weight of the output layer, [V, H], or a function from hidden states [n, H] to logits [n, V].
Output = torch.Tensor | Callable[[torch.Tensor], torch.Tensor]


def chunked_loss(
    hidden: torch.Tensor,
    output: Output,
    labels: torch.Tensor,
    token_weights: torch.Tensor,
    denominator: str = "weights",
    *,
    chunk: int = CHUNK,
    sampler_log_probs: torch.Tensor | None = None,
    ratio_limit: float | None = None,
) -> torch.Tensor:
    """Return :func:`energon_ext.unified_loss` of the logits that hidden states would give.

    Positions with weight 0 have no logits, not even in their chunk.

    Args:
        hidden: float [N, H], the input of the output layer.
        output: its weight, or a function that returns logits, for layers with a bias, a scale or a
            soft cap.
        chunk: positions of which logits exist at any time.
        labels, token_weights, denominator, sampler_log_probs, ratio_limit: see
            :func:`energon_ext.unified_loss`.

    Raises:
        ConfigError, SampleError: as for ``unified_loss``, except for labels that are too large, or
            ``chunk`` < 1.

    Example:
        >>> hidden, weight = torch.ones(3, 2), torch.zeros(4, 2)
        >>> loss = chunked_loss(hidden, weight, torch.tensor([1, 3, 0]), torch.ones(3), chunk=2)
        >>> round(loss.item(), 6)
        1.386294
    """
    check_loss_inputs(hidden, labels, token_weights, _words(output), sampler_log_probs)
    trained = token_weights != 0
    nll = -_log_probs(hidden[trained], output, labels[trained], chunk)
    sampled = None if sampler_log_probs is None else sampler_log_probs[trained]
    return weighted_mean(nll, token_weights[trained], denominator, sampled, ratio_limit)


def chunked_log_probs(
    hidden: torch.Tensor, output: Output, labels: torch.Tensor, chunk: int = CHUNK
) -> torch.Tensor:
    """Return the log-probability of each label, float32 [N], for losses by position.

    Args:
        hidden, output, chunk: see :func:`chunked_loss`.
        labels: int64 [N], in ``[0, V)`` everywhere.

    Raises:
        SampleError: shapes do not match, or a label is out of range; those that are too large are
            not found if ``output`` is a function.

    Example:
        >>> chunked_log_probs(torch.ones(2, 2), torch.zeros(4, 2), torch.tensor([1, 3])).exp()
        tensor([0.2500, 0.2500])
    """
    everywhere = torch.ones(labels.shape, device=labels.device)
    check_loss_inputs(hidden, labels, everywhere, _words(output))
    return _log_probs(hidden, output, labels, chunk)


def _words(output: Output) -> int | None:
    """Return the size of the vocabulary, None if it is unknown."""
    return len(output) if isinstance(output, torch.Tensor) else None


def _log_probs(
    hidden: torch.Tensor, output: Output, labels: torch.Tensor, chunk: int
) -> torch.Tensor:
    def compute(hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = hidden @ output.T if isinstance(output, torch.Tensor) else output(hidden)
        return -F.cross_entropy(logits.float(), labels, reduction="none")

    return compute_in_chunks(compute, hidden, labels, chunk)


def compute_in_chunks(
    compute: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    hidden: torch.Tensor,
    labels: torch.Tensor,
    chunk: int,
) -> torch.Tensor:
    """Return ``compute(hidden, labels)``, computed for chunks of their first dimension.

    The backward pass computes each chunk again.
    """
    check_integer("chunk", chunk, 1)
    if not len(hidden):
        return compute(hidden, labels)
    pairs = zip(hidden.split(chunk), labels.split(chunk))
    losses = [
        checkpoint(compute, *pair, use_reentrant=False, preserve_rng_state=False) for pair in pairs
    ]
    return torch.cat(losses)
