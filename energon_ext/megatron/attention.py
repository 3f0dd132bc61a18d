# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Attention that never crosses a segment, without Transformer Engine.

Transformer Engine handles ``packed_seq_params`` itself; Megatron-core's own attention rejects them.
"""

import importlib.util
import inspect
import math
from typing import Any, cast

import megatron.core
import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.torch_norm import L2Norm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from energon_ext.errors import ConfigError
from energon_ext.megatron.gathered_attention import attend_over_ranks

try:
    from torch.nn.attention.varlen import varlen_attn

    #: Options of the kernel. That of torch 2.10 takes neither a window nor a scale; that of torch
    #: 2.13 takes groups only with an option.
    _KERNEL_OPTIONS = frozenset(inspect.signature(varlen_attn).parameters)
except ImportError:  # torch < 2.10
    varlen_attn = None  # type: ignore[assignment]
    _KERNEL_OPTIONS = frozenset()

_TAKES_GROUPS: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in _KERNEL_OPTIONS else {}


def gpt_layer_spec(
    config: TransformerConfig, vp_stage: int | None = None
) -> TransformerBlockSubmodules:
    """Return the layers of this pipeline stage for ``GPTModel(transformer_layer_spec=...)``.

    With Transformer Engine on a GPU these are Megatron's own layers; otherwise their attention is a
    :class:`SegmentAttention`. Dense, MoE and alternating layers, ``qk_layernorm``, RMSNorm and
    LayerNorm follow ``config``.

    Args:
        config: Megatron's ``TransformerConfig``.
        vp_stage: virtual pipeline stage, if a rank has several.

    Raises:
        ConfigError: ``config`` needs a feature that only Transformer Engine has, on a GPU with
            megatron-core before 0.17 also experts.
    """
    use_transformer_engine = has_transformer_engine()
    block = get_gpt_decoder_block_spec(
        config,
        use_transformer_engine,
        normalization=config.normalization,
        qk_l2_norm=getattr(config, "qk_l2_norm", False),  # missing in megatron-core 0.15.0
        vp_stage=vp_stage,
    )
    if use_transformer_engine:
        return block
    _check_config(config)
    _check_router(config)
    block.layer_norm = TorchNorm
    for layer in block.layer_specs:
        replace_norms(layer.submodules, "input_layernorm", "pre_mlp_layernorm")
        attention = layer.submodules.self_attention.submodules
        replace_norms(attention, "q_layernorm", "k_layernorm", "kv_layernorm")
        attention.core_attention = SegmentAttention
    return block


class SegmentAttention(torch.nn.Module):
    """Causal attention within each segment of a packed sequence, as Megatron's ``core_attention``.

    Runs one variable-length kernel on GPUs that support it, else scaled dot product attention
    once per segment. Without ``packed_seq_params`` every sequence of the batch is one segment.
    Segments that a layout cuts over ranks attend to keys and values gathered from all of them.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType | None,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ):
        super().__init__()
        _check_config(config, attention_dropout)
        self.softmax_scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        """Return the attention output; raise ConfigError for a mask or bias.

        Args:
            query: [t, heads, channels] when packed, else [s, b, heads, channels].
            key, value: as ``query`` with ``groups`` heads; ``heads`` is a multiple of ``groups``.
            packed_seq_params: segment ends of the packed sequence; they replace a mask.

        Returns:
            [t, heads * channels] when packed, else [s, b, heads * channels].
        """
        if attention_mask is not None or attention_bias is not None:
            raise ConfigError(
                "SegmentAttention takes no attention mask or bias: pass attention_mask=None and "
                "describe the segments with packed_seq_params."
            )
        if packed_seq_params is None:
            context = self._causal(*(x.permute(1, 2, 0, 3) for x in (query, key, value)))
            return context.permute(2, 0, 1, 3).flatten(-2)
        padded = packed_seq_params.cu_seqlens_q_padded
        ends = packed_seq_params.cu_seqlens_q if padded is None else padded
        if (group := getattr(packed_seq_params, "cp_group", None)) is not None:
            return attend_over_ranks(query, key, value, ends, group, self.softmax_scale)
        if _has_varlen_kernel(query):
            longest = int(packed_seq_params.max_seqlen_q)
            output = varlen_attn(
                query, key, value, ends, ends, longest, longest,
                scale=self.softmax_scale, window_size=(-1, 0), **_TAKES_GROUPS,  # causal
            )  # fmt: skip
            return cast(torch.Tensor, output).flatten(-2)  # a tuple only with extra outputs
        lengths = ends.diff().tolist()
        # Use split, not slices: the gradients of n slices would be n tensors of full length.
        segments = zip(*(x.transpose(0, 1).split(lengths, dim=1) for x in (query, key, value)))
        context = torch.cat([self._causal(*segment) for segment in segments], dim=1)
        return context.transpose(0, 1).flatten(-2)

    def _causal(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Attend within one segment; all are [..., heads or groups, positions, channels]."""
        if query.is_cuda and not _is_half(query):
            # The only kernel that would take groups there keeps all scores in memory.
            heads_per_group = query.shape[-3] // key.shape[-3]
            key = key.repeat_interleave(heads_per_group, dim=-3)
            value = value.repeat_interleave(heads_per_group, dim=-3)
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=self.softmax_scale, enable_gqa=True
        )


class TorchNorm:
    """RMSNorm or LayerNorm from torch that also works with sequence parallelism.

    Megatron's own wrapper rejects sequence parallelism, although marking the parameters is enough:
    Megatron then sums their gradients over the tensor-parallel ranks.
    """

    # Megatron calls the class and expects a module.
    def __new__(  # type: ignore[misc]
        cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any
    ) -> torch.nn.Module:
        norm_class = torch.nn.RMSNorm if config.normalization == "RMSNorm" else torch.nn.LayerNorm
        norm = norm_class(hidden_size, eps=eps, dtype=config.params_dtype)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm


def replace_norms(submodules: Any, *names: str) -> None:
    for name in names:
        if getattr(submodules, name, IdentityOp) not in (IdentityOp, L2Norm):
            setattr(submodules, name, TorchNorm)


def has_transformer_engine() -> bool:
    return torch.cuda.is_available() and bool(importlib.util.find_spec("transformer_engine"))


def _check_config(config: TransformerConfig, attention_dropout: float | None = None) -> None:
    dropout = config.attention_dropout if attention_dropout is None else attention_dropout
    for field, found, allowed in (
        ("attention_dropout", dropout, 0.0),
        ("context_parallel_size", config.context_parallel_size, 1),
        ("window_size", config.window_size, None),
        ("softmax_type", getattr(config, "softmax_type", "vanilla"), "vanilla"),
        ("layernorm_zero_centered_gamma", config.layernorm_zero_centered_gamma, False),
    ):
        if found != allowed:
            raise ConfigError(
                f"TransformerConfig.{field}={found!r} needs Transformer Engine on a GPU; "
                f"without it only {allowed!r} is supported."
            )


def _check_router(config: TransformerConfig) -> None:
    """Refuse experts whose router reads a name that only Transformer Engine imports."""
    version = tuple(map(int, megatron.core.__version__.split(".")[:2]))
    is_broken = version < (0, 17) and not hasattr(moe_utils, "te_general_gemm")
    if config.num_moe_experts and is_broken:
        raise ConfigError(
            f"TransformerConfig.num_moe_experts={config.num_moe_experts}: without Transformer "
            f"Engine the router of megatron-core {megatron.core.__version__} ends with a NameError "
            f"(te_general_gemm); use megatron-core 0.17 or later, or install Transformer Engine."
        )


def _has_varlen_kernel(query: torch.Tensor) -> bool:
    return "window_size" in _KERNEL_OPTIONS and query.is_cuda and _is_half(query)


def _is_half(tensor: torch.Tensor) -> bool:
    return tensor.dtype in (torch.float16, torch.bfloat16)
