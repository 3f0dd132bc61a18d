# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Build the model of a launch on the meta device, without memory, and count its parameters."""

import dataclasses

import torch
import torch.nn.functional as F
from launch_options import padded_vocab_size
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from energon_ext import ConfigError
from energon_ext.megatron import gpt_layer_spec
from energon_ext.megatron.attention import has_transformer_engine

#: Arguments of Megatron-LM -> config fields with a different name.
RENAMED = {"num_experts": "num_moe_experts", "norm_epsilon": "layernorm_epsilon"}
SWIGLU = {"gated_linear_unit": True, "activation_func": F.silu}

#: Models that these functions cannot build.
OTHER_MODELS = (
    "hybrid_override_pattern",
    "hybrid_layer_pattern",
    "is_hybrid_model",
    "heterogeneous_layers_config_path",
)


def describe_model(options, replicas):
    """Describe the parallelism of a model and count its parameters.

    Raises:
        ConfigError: it is no GPT model, or Megatron-core rejects the options.
    """
    for name in OTHER_MODELS:
        if name in options:
            raise ConfigError(f"--{name.replace('_', '-')}: this script builds only GPT models.")
    if options.get("multi_latent_attention") and not has_transformer_engine():
        raise ConfigError("--multi-latent-attention: is built only with Transformer Engine.")
    try:
        config = build_config(options)
        model = build_model(options)
    except ConfigError:
        raise
    # Megatron-core checks its options by assertions and by all kinds of errors.
    except Exception as error:
        reason = " ".join(str(error).split())
        kind = type(error).__name__
        raise ConfigError(f"Megatron-core rejects the options: {kind}: {reason}") from error
    total = sum(parameter.numel() for parameter in model.parameters())
    active = active_parameters(model) / 1e9
    rest = ", without its MTP layers" if options.get("mtp_num_layers") else ""
    return (
        f"parallelism: {describe_parallelism(config)}, data {replicas}\n"
        f"parameters: {total:,} ({total / 1e9:.2f}B), {active:.2f}B active{rest}"
    )


def build_config(options, **overrides):
    """Build Megatron's config from options."""
    is_latent = options.get("multi_latent_attention")
    config_class = MLATransformerConfig if is_latent else TransformerConfig
    types = {field.name: str(field.type) for field in dataclasses.fields(config_class)}
    values = {RENAMED.get(name, name): value for name, value in options.items()}
    values = {
        name: [value]
        if types[name] == "typing.Optional[typing.List[str]]" and isinstance(value, str)
        else value
        for name, value in values.items()
        if name in types
    }
    dtype = torch.bfloat16 if options.get("bf16") else torch.float32
    return config_class(
        **{
            **values,
            **(SWIGLU if options.get("swiglu") else {}),
            "add_bias_linear": not options.get("disable_bias_linear"),
            "params_dtype": dtype,
            "pipeline_dtype": dtype,
            "calculate_per_token_loss": True,
            "moe_permute_fusion": False,  # needs Transformer Engine
            **overrides,
        }
    )


def build_model(options):
    """Build the whole model on the meta device, without parallelism."""
    unsplit = {
        f"{kind}_parallel_size": 1
        for kind in ("tensor_model", "pipeline_model", "context", "expert_model", "expert_tensor")
    }
    config = build_config(
        options,
        **unsplit,
        sequence_parallel=False,
        # These need Transformer Engine, too.
        attention_dropout=0.0,
        window_size=None,
        layernorm_zero_centered_gamma=False,
        moe_grouped_gemm=False,  # needs GPU kernels; the parameters are the same
        perform_initialization=False,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
    )
    layers = gpt_layer_spec(config)
    for layer in layers.layer_specs:  # attention itself has no parameters
        layer.submodules.self_attention.submodules.core_attention = IdentityOp
    with torch.device("meta"):
        return GPTModel(
            config,
            layers,
            padded_vocab_size(options),
            options.get("max_position_embeddings", options["seq_length"]),
            share_embeddings_and_output_weights=not options.get(
                "untie_embeddings_and_output_weights"
            ),
            position_embedding_type=options["position_embedding_type"],
            rotary_base=options["rotary_base"],
        )


def active_parameters(model):
    """Return the number of parameters used to predict a token."""
    config = model.config
    total = sum(parameter.numel() for parameter in model.parameters())
    if not config.num_moe_experts:
        return total
    in_experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    idle = 1 - config.moe_router_topk / config.num_moe_experts
    return total - round(in_experts * idle)


def describe_parallelism(config):
    names = ("tensor_model", "pipeline_model", "context", "expert_model")
    sizes = {name: getattr(config, f"{name}_parallel_size") for name in names}
    return ", ".join(f"{name.partition('_')[0]} {size}" for name, size in sizes.items())
