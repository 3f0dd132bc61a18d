# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Check a file of Megatron-LM arguments on a machine without GPUs.

    python examples/launch/check.py examples/launch/llama3_8b.args --gpus 16 --data mix.yaml

Further options of Megatron-LM may follow.

If Megatron-LM is installed, it parses and checks all options of the run. The script checks that the
parallelism fits the model, the batch and the GPUs, builds Megatron's config and, on the meta
device, which takes no memory, the whole model, and prints its number of parameters. With --data it
also builds the data of the first and the last rank as the run would, and draws a batch of each;
--encoder names a function that returns the run's own task encoder. Options that are not given have
Megatron-LM's defaults. ``torchrun.sh --dry-run`` calls it.
"""

import argparse
import ast
import contextlib
import dataclasses
import io
import os
import re
import shlex
import sys
import types
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.energon import WorkerConfig

from energon_ext import (
    ConfigError,
    DynamicBlendMixin,
    ExactDataLoader,
    PackedBatch,
    PackedTaskEncoder,
    get_train_dataset,
    load_tokenizer,
)
from energon_ext.cli.mix import named_encoder
from energon_ext.megatron import add_energon_args, enable_cpu, gpt_layer_spec
from energon_ext.megatron.attention import has_transformer_engine
from energon_ext.megatron.lm.arguments import check_arguments

#: Arguments of Megatron-LM -> config fields with a different name.
RENAMED = {"num_experts": "num_moe_experts", "norm_epsilon": "layernorm_epsilon"}
SWIGLU = {"gated_linear_unit": True, "activation_func": F.silu}

#: Megatron-LM's defaults, of version 0.19, where they are not those of the config.
DEFAULTS = {
    **{f"{kind}_parallel_size": 1 for kind in ("tensor_model", "pipeline_model", "context")},
    "expert_model_parallel_size": 1,
    "make_vocab_size_divisible_by": 128,
    "micro_batch_size": 1,
    "position_embedding_type": "learned_absolute",
    "rotary_base": 10000,
}
#: Options without a default that is right for every model.
REQUIRED = ("num_layers", "hidden_size", "num_attention_heads", "seq_length")
#: Options that are one integer.
NUMBERS = (
    *REQUIRED,
    *("ffn_hidden_size", "num_query_groups", "kv_channels", "num_experts", "moe_ffn_hidden_size"),
    *("micro_batch_size", "global_batch_size", "vocab_size", "max_position_embeddings"),
    *(name for name in DEFAULTS if name != "position_embedding_type"),
    "expert_tensor_parallel_size",
)
#: With one of these, stages may have different numbers of layers.
UNEVEN_STAGES = (
    *("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"),
    *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
    *("pipeline_model_parallel_layout", "num_virtual_stages_per_pipeline_rank"),
)
#: Models that this script cannot build.
OTHER_MODELS = (
    "hybrid_override_pattern",
    "hybrid_layer_pattern",
    "is_hybrid_model",
    "heterogeneous_layers_config_path",
)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("arguments", type=Path)
    parser.add_argument("--gpus", type=int, required=True)
    parser.add_argument("--data", type=Path, help="a metadataset")
    parser.add_argument("--tokenizer", default="bytes", help="default: %(default)s")
    parser.add_argument("--encoder", metavar="MODULE:FUNCTION", help="of the data")
    args, more = parser.parse_known_args()
    energon = Path(__file__).with_name("energon.args")
    paths = ["--data-path", str(args.data), "--dataloader-save", "data"]  # as torchrun.sh
    command = [*tokens_of(args.arguments), *tokens_of(energon), *paths, *more]
    try:
        print(f"options: {parse_as_megatron_lm(command, args.gpus)}")
        options = read_options(args.arguments, more)
        replicas = check_parallelism(options, args.gpus)
        if args.data is not None:
            for rank in sorted({0, replicas - 1}):
                encoder = args.encoder or load_tokenizer(args.tokenizer)
                print(first_batch(options, args.data, encoder, rank, replicas))
        print(describe_model(options, replicas))
    except ConfigError as error:
        sys.exit(f"ConfigError: {args.arguments}: {error}")


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


def tokens_of(path):
    return shlex.split(path.read_text(), comments=True)


def read_options(path, more=()):
    """Read the options of a file, and more, as a dictionary of values.

    Flags are True, and several values a list. Missing options have Megatron-LM's defaults.

    Raises:
        ConfigError: the size of the model is not given.
    """
    options, name = {}, None
    for token in (*tokens_of(path), *more):
        if token.startswith("--"):
            name, _, value = token[2:].partition("=")
            name = name.replace("-", "_")
            options[name] = [value_of(value)] if value else []
        elif name is None:
            raise ConfigError(f"{token!r} found, an option such as --num-layers is needed first.")
        else:
            options[name].append(value_of(token))
    options = {name: values[0] if len(values) == 1 else values for name, values in options.items()}
    options = {**DEFAULTS, **{name: value == [] or value for name, value in options.items()}}
    for name in REQUIRED:
        if name not in options:
            raise ConfigError(f"--{name.replace('_', '-')} is missing.")
    for name in NUMBERS:
        if name in options and type(options[name]) is not int:
            found = f"--{name.replace('_', '-')}: {options[name]!r} found"
            raise ConfigError(f"{found}, one integer is needed.")
    if not options.get("group_query_attention"):
        options["num_query_groups"] = None  # each head has its own keys
    elif "num_query_groups" not in options:
        options["num_query_groups"] = 1
    if options["tensor_model_parallel_size"] == 1:
        options["sequence_parallel"] = False  # as Megatron-LM
    if options.get("swiglu") and "ffn_hidden_size" not in options:
        options["ffn_hidden_size"] = int(options["hidden_size"] * 4 * 2 / 3 / 64) * 64
    return options


def value_of(token):
    """Return the value of a token: a number, a list such as ``([0]*3+[1]*58)``, or the token."""
    with contextlib.suppress(ValueError, SyntaxError):
        return ast.literal_eval(token)
    if re.fullmatch(r"\(?(\[[\d,]+\](\*\d{1,4})?\+?)+\)?", token):
        parts = re.findall(r"\[([\d,]+)\](?:\*(\d+))?", token)
        return [int(n) for part, times in parts for n in part.split(",") * int(times or 1)]
    return token


def parse_as_megatron_lm(command, gpus):
    """Run the parsers and checks of Megatron-LM and energon_ext; return a description.

    Raises:
        ConfigError: an option was rejected; Megatron-LM's parser exits on unknown ones.
    """
    try:
        from megatron.training.arguments import parse_args, validate_args
    except ImportError as error:
        return f"not parsed, as Megatron-LM cannot be imported here ({error})"
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # as torchrun.sh
    if not torch.cuda.is_available():  # pretend to have an H100, as Megatron-LM reads its features
        torch.cuda.get_device_capability = lambda *_: (9, 0)
        torch.cuda.get_device_properties = lambda *_: types.SimpleNamespace(major=9, minor=0)
    sys.argv[1:] = command
    args = parse_args(add_energon_args)
    args.world_size = gpus
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            validate_args(args)
    except (AssertionError, RuntimeError, ValueError) as error:
        raise ConfigError(f"Megatron-LM rejects the options: {error}") from error
    check_arguments(args)
    return "accepted by Megatron-LM"


def check_parallelism(options, gpus):
    """Return the number of data-parallel replicas.

    Raises:
        ConfigError: a parallel size does not divide a size that it splits.
    """

    def size(kind, default=1):
        return options.get(f"{kind}_parallel_size", default)

    tensor, pipeline, context = size("tensor_model"), size("pipeline_model"), size("context")
    experts = 1
    if options.get("num_experts"):
        experts = size("expert_model") * size("expert_tensor", tensor) * pipeline
    alignment = (2 * context if context > 1 else 1) * tensor
    replica = tensor * pipeline * context
    micro_batches = options["micro_batch_size"] * max(1, gpus // replica)
    layers = 0 if any(name in options for name in UNEVEN_STAGES) else options["num_layers"]
    for name, number, divisor in (
        ("--gpus", gpus, replica),
        ("--gpus", gpus, experts),
        ("--num-experts", options.get("num_experts") or 0, size("expert_model")),
        ("--num-attention-heads", options["num_attention_heads"], tensor),
        ("--num-attention-heads", options["num_attention_heads"], options["num_query_groups"] or 1),
        ("--num-query-groups", options["num_query_groups"] or 0, tensor),
        ("--num-layers", layers, pipeline),
        ("--seq-length", options["seq_length"], alignment),
        ("--global-batch-size", options.get("global_batch_size", micro_batches), micro_batches),
    ):
        if number % divisor:
            raise ConfigError(f"{name} {number} is not a multiple of {divisor}.")
    return gpus // replica


def first_batch(options, data, encoder, rank, ranks):
    """Describe the first batch of a data-parallel rank.

    Args:
        encoder: a tokenizer, or the ``MODULE:FUNCTION`` of a task encoder.

    Raises:
        ConfigError: the data cannot be read, or its tokenizer has more ids than the model.
    """
    if isinstance(encoder, str):
        encoder = named_encoder(encoder, DynamicBlendMixin)
    else:
        if encoder.vocab_size > (ids := padded_vocab_size(options)):
            raise ConfigError(f"the tokenizer has {encoder.vocab_size} ids, the model only {ids}.")
        context = options["context_parallel_size"]
        alignment = 2 * context if context > 1 else 1
        encoder = PackedTaskEncoder(encoder, options["seq_length"], alignment=alignment)
    dataset = get_train_dataset(
        data,
        worker_config=WorkerConfig(rank=rank, world_size=ranks, num_workers=0),
        batch_size=1,
        rows_per_step=options.get("global_batch_size", ranks),
        task_encoder=encoder,
    )
    batch = next(iter(ExactDataLoader(dataset)))
    if not isinstance(batch, PackedBatch):
        return f"data: rank {rank} of {ranks} reads a batch of type {type(batch).__name__} first"
    batch.validate()
    tokens = batch.num_tokens - int(batch.padding_mask().sum())
    sources = ", ".join(name for name, count in batch.tokens_per_source().items() if count)
    return f"data: rank {rank} of {ranks} reads {tokens:,} tokens of {sources} first"


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


def padded_vocab_size(options):
    """Return Megatron-LM's padded vocabulary size with NullTokenizer and its special token.

    Raises:
        ConfigError: it comes from a tokenizer's files.
    """
    if "vocab_size" not in options:
        raise ConfigError("--vocab-size is missing: give the number of the tokenizer's ids.")
    multiple = options["make_vocab_size_divisible_by"] * options["tensor_model_parallel_size"]
    return -(-(options["vocab_size"] + 1) // multiple) * multiple


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


if __name__ == "__main__":
    enable_cpu()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1, inference_rng_tracker=True)
    main()
