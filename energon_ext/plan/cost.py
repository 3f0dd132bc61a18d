# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Estimate the compute of a row from the lengths of its documents and the size of its images."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Callable

import numpy as np

from energon_ext.arguments import check_integer, check_number
from energon_ext.errors import ConfigError, StateFormatError
from energon_ext.keyed import sha256
from energon_ext.registry import Registry

#: Maps lengths of pieces of documents, int64 [n], to their costs, float64 [n], in any unit.
Cost = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class AttentionCost:
    """Matrix products of a causal model over a document that attends only to itself.

    Projections, MLPs, state-space layers and the output layer cost the same for every token;
    attention costs a token as much as it attends to other tokens. Only the ratio of ``linear`` to
    ``quadratic`` matters.

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

    def __post_init__(self) -> None:
        check_number("AttentionCost.linear", self.linear)
        check_number("AttentionCost.quadratic", self.quadratic)
        if self.window is not None:
            check_integer("AttentionCost.window", self.window, 1)

    @classmethod
    def of_model(
        cls, config: Any, vocab_size: int = 0, pattern: str | None = None
    ) -> "AttentionCost":
        """Build from a ``megatron.core.transformer.TransformerConfig`` and the vocabulary size.

        Covers dense and MoE, grouped queries, gated MLP, sliding window, multi-latent attention,
        and state-space layers: their projections, and two products with the state per token.

        Args:
            pattern: of a hybrid model, Megatron's ``hybrid_layer_pattern``: a letter per layer,
                ``*`` and ``+`` attention, ``M`` state space, ``-`` MLP, ``E`` experts. Boundaries
                of stages (``|``) are skipped, and layers that predict later tokens (after ``/``)
                count as well.

        Raises:
            ConfigError: a hybrid model without a pattern, or another letter in it.

        Example:
            >>> from types import SimpleNamespace
            >>> config = SimpleNamespace(
            ...     hidden_size=8, num_attention_heads=2, kv_channels=None, num_query_groups=None,
            ...     multi_latent_attention=False, gated_linear_unit=False, ffn_hidden_size=32,
            ...     num_moe_experts=None, window_size=None,
            ... )
            >>> cost = AttentionCost.of_model(config, pattern="*-|-")
            >>> cost.linear == 2 * (4 * 8 * 8 + 2 * 2 * 8 * 32), cost.quadratic == 2 * (8 + 8)
            (True, True)
        """
        layers = _layers_of(config, pattern)
        projections, scores = _attention(config)
        hidden = config.hidden_size
        ffn = config.ffn_hidden_size or 4 * hidden
        widths = layers["-"] * ffn
        if layers["E"]:
            width = (config.moe_ffn_hidden_size or ffn) * config.moe_router_topk
            widths += layers["E"] * (width + (config.moe_shared_expert_intermediate_size or 0))
        parameters = layers["*"] * projections
        parameters += widths * hidden * (3 if config.gated_linear_unit else 2)
        if layers["M"]:
            parameters += layers["M"] * _state_space(config)
        window = config.window_size
        return cls(
            2.0 * (parameters + hidden * vocab_size),
            2.0 * layers["*"] * scores,
            window[0] + 1 if window else None,
        )

    def __call__(self, lengths: np.ndarray) -> np.ndarray:
        """Return the costs of documents, or pieces of them, that attend only to themselves."""
        lengths = lengths.astype(np.float64)
        window = np.minimum(lengths, self.window or np.inf)
        pairs = window * (window + 1) / 2 + (lengths - window) * window
        return self.linear * lengths + self.quadratic * pairs


def _layers_of(config: Any, pattern: str | None) -> Counter[str]:
    """Return the number of layers of each kind, by their letters in a pattern of Megatron.

    A layer of a model without a pattern has attention and an MLP, or experts for it.
    """
    if pattern is not None:
        layers = Counter(pattern.replace("|", "").replace("/", ""))
        layers["*"] += layers.pop("+", 0)  # multi-latent; a model has one kind of attention
        if others := layers.keys() - set("*-EM"):
            raise ConfigError(
                f"AttentionCost.of_model: layers {sorted(others)} of the pattern {pattern!r} are "
                f"not counted, only '*', '+', '-', 'E' and 'M' are; give the cost yourself, as "
                f"AttentionCost(linear, quadratic)."
            )
        return layers
    if getattr(config, "is_hybrid_model", False):
        raise ConfigError(
            "AttentionCost.of_model: the config of a hybrid model found, but not its layers; give "
            "its hybrid_layer_pattern as pattern (in Megatron-LM, --hybrid-layer-pattern)."
        )
    count = config.num_layers
    experts = 0
    if config.num_moe_experts:
        frequency = config.moe_layer_freq
        kinds = frequency if isinstance(frequency, list) else [1] + [0] * (frequency - 1)
        experts = sum(kinds[layer % len(kinds)] for layer in range(count))
    return Counter({"*": count, "-": count - experts, "E": experts})


def _attention(config: Any) -> tuple[int, int]:
    """Return the parameters of an attention layer, and the products per pair of tokens."""
    hidden, heads = config.hidden_size, config.num_attention_heads
    channels = config.kv_channels or hidden // heads
    query, groups = heads * channels, config.num_query_groups or heads
    if not config.multi_latent_attention:
        return hidden * (2 * query + 2 * groups * channels), 2 * query
    keys = config.qk_head_dim + config.qk_pos_emb_head_dim
    latent = config.kv_lora_rank
    rank = config.q_lora_rank or hidden
    projections = (hidden * rank if config.q_lora_rank else 0) + rank * heads * keys
    projections += hidden * (latent + config.qk_pos_emb_head_dim)
    projections += latent * heads * (config.qk_head_dim + config.v_head_dim)
    projections += heads * config.v_head_dim * hidden
    return projections, heads * (keys + config.v_head_dim)


def _state_space(config: Any) -> int:
    """Return the parameters of a state-space layer, and its products with the state per token."""
    hidden, state = config.hidden_size, config.mamba_state_dim
    heads = config.mamba_num_heads or 2 * hidden // config.mamba_head_dim
    inner = heads * config.mamba_head_dim
    into = 2 * inner + 2 * config.mamba_num_groups * state + heads
    return int(hidden * (into + inner) + 2 * inner * state)


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


#: All costs of rows by name, which states contain. A module of yours may add its own: a class whose
#: attributes are its arguments, as JSON values.
COSTS = Registry("cost", None, attention=AttentionCost)


def cost_to_json(cost: Cost | None) -> dict[str, Any] | None:
    """Return the name and the options of a cost; a name alone if it is not in ``COSTS``.

    Raises:
        ConfigError: the attributes of a registered one are not JSON values.
    """
    if cost is None:
        return None
    for name, cost_class in COSTS.items():
        if type(cost) is cost_class:
            options = getattr(cost, "__dict__", {})
            try:
                json.dumps(options, allow_nan=False)
            except (TypeError, ValueError) as error:
                raise ConfigError(
                    f"cost {name!r}: its attributes must be JSON values, since states contain "
                    f"them ({error})."
                ) from error
            return {**options, "name": name}
    own = cost if hasattr(cost, "__qualname__") else type(cost)
    return {"name": f"{own.__module__}.{getattr(own, '__qualname__', '')}"}


def load_cost(cost: Mapping[str, Any] | None) -> Cost | None:
    """Build a cost from its JSON; None for none, and for one that is not in ``COSTS``.

    Raises:
        StateFormatError: its options are not those of the registered class.
    """
    if cost is None or not is_known(cost):
        return None
    options = {name: value for name, value in cost.items() if name != "name"}
    try:
        found: Cost = COSTS[cost["name"]](**options)
    except (TypeError, ValueError) as error:
        raise StateFormatError(
            f"cost: {cost!r:.200} found, which does not fit the cost of this name ({error}); the "
            f"state is damaged, or another module registered it."
        ) from error
    return found


def is_known(cost: Mapping[str, Any] | None) -> bool:
    """Return False for the JSON of a cost that is not in ``COSTS``."""
    return cost is None or cost["name"] in list(COSTS)


def digest_of_cost(cost: Cost, row_tokens: int) -> str:
    """Return a digest of the costs of all lengths; a function's name would not identify it."""
    costs = np.asarray(cost(np.arange(1, row_tokens + 2)), np.float64)
    return sha256(costs.tobytes())[:16]
