# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Estimate the compute of a row from the lengths of its documents and the size of its images."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, Callable

import numpy as np

#: Maps lengths of pieces of documents, int64 [n], to their costs, float64 [n], in any unit.
Cost = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class AttentionCost:
    """Matrix products of a causal transformer over a document that attends only to itself.

    Projections, MLP and output layer cost the same for every token; attention costs a token as much
    as it attends to other tokens. Only the ratio of ``linear`` to ``quadratic`` matters.

    Attributes:
        linear: floating-point operations per token outside the attention scores.
        quadratic: floating-point operations per token and token that it attends to.
        window: most tokens that a token attends to, including itself; None for no limit.

    Example:
        >>> AttentionCost(linear=10, quadratic=2)(np.array([1, 4]))
        array([12., 60.])
        >>> AttentionCost(linear=10, quadratic=2, window=2)(np.array([1, 4]))
        array([12., 54.])
    """

    #: A dense model with 32 layers, hidden size 4096, MLP 14336, 8 groups, vocabulary 128 256.
    linear: float = 1.5e10
    quadratic: float = 5.2e5
    window: int | None = None

    @classmethod
    def of_model(cls, config: Any, vocab_size: int = 0) -> "AttentionCost":
        """Build from a ``megatron.core.transformer.TransformerConfig`` and the vocabulary size.

        Covers dense and MoE, grouped queries, gated MLP, sliding window, multi-latent attention.
        """
        hidden, layers, heads = config.hidden_size, config.num_layers, config.num_attention_heads
        channels = config.kv_channels or hidden // heads
        query, groups = heads * channels, config.num_query_groups or heads
        projections = hidden * (2 * query + 2 * groups * channels)
        scores = 2 * query
        if config.multi_latent_attention:
            keys = config.qk_head_dim + config.qk_pos_emb_head_dim
            latent = config.kv_lora_rank
            rank = config.q_lora_rank or hidden
            projections = (hidden * rank if config.q_lora_rank else 0) + rank * heads * keys
            projections += hidden * (latent + config.qk_pos_emb_head_dim)
            projections += latent * heads * (config.qk_head_dim + config.v_head_dim)
            projections += heads * config.v_head_dim * hidden
            scores = heads * (keys + config.v_head_dim)
        matrices = 3 if config.gated_linear_unit else 2
        ffn = config.ffn_hidden_size or 4 * hidden
        widths = layers * ffn
        if config.num_moe_experts:
            width = (config.moe_ffn_hidden_size or ffn) * config.moe_router_topk
            width += config.moe_shared_expert_intermediate_size or 0
            frequency = config.moe_layer_freq
            pattern = frequency if isinstance(frequency, list) else [1] + [0] * (frequency - 1)
            experts = sum(pattern[layer % len(pattern)] for layer in range(layers))
            widths = experts * width + (layers - experts) * ffn
        parameters = layers * projections + widths * hidden * matrices
        window = config.window_size
        return cls(
            2.0 * (parameters + hidden * vocab_size),
            2.0 * layers * scores,
            window[0] + 1 if window else None,
        )

    def __call__(self, lengths: np.ndarray) -> np.ndarray:
        """Return the costs of documents, or pieces of them, that attend only to themselves."""
        lengths = lengths.astype(np.float64)
        window = np.minimum(lengths, self.window or np.inf)
        pairs = window * (window + 1) / 2 + (lengths - window) * window
        return self.linear * lengths + self.quadratic * pairs


@dataclass(frozen=True)
class VisionCost:
    """Matrix products of a vision encoder, in the unit of :class:`AttentionCost`.

    All patches of an image attend to each other. Return the sum over the images of a sample from
    ``length_of``, as its cost in addition to the tokens.

    Attributes:
        linear: floating-point operations per patch outside the attention scores.
        quadratic: floating-point operations per patch and patch that it attends to.

    Example:
        >>> VisionCost(linear=10, quadratic=2)(np.array([1, 4]))
        array([12., 72.])
    """

    linear: float
    quadratic: float

    @classmethod
    def of_model(cls, vision: Any, projection: Any = None, *, frozen: bool = False) -> "VisionCost":
        """Build from the configurations of a ``megatron.core.models.multimodal.LLaVAModel``.

        Args:
            vision: ``TransformerConfig`` of the vision encoder.
            projection: ``TransformerConfig`` of the MLP after it, which processes every patch.
            frozen: whether neither is trained; both then only run forward, a third of the compute.
        """
        of_patches = AttentionCost.of_model(vision)
        linear = of_patches.linear
        if projection is not None:
            into = (2 if projection.gated_linear_unit else 1) * vision.hidden_size
            linear += 2.0 * projection.ffn_hidden_size * (into + projection.hidden_size)
        share = 1 / 3 if frozen else 1.0
        return cls(share * linear, share * of_patches.quadratic)

    def __call__(self, patches: np.ndarray) -> np.ndarray:
        """Return the costs of images, given their numbers of patches."""
        patches = patches.astype(np.float64)
        return self.linear * patches + self.quadratic * patches**2


def digest_of_cost(cost: Cost, row_tokens: int) -> str:
    """Return a digest of the costs of all lengths; a function's name would not identify it."""
    costs = np.asarray(cost(np.arange(1, row_tokens + 2)), np.float64)
    return hashlib.sha256(costs.tobytes()).hexdigest()[:16]
