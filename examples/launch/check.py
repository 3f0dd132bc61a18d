# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Check a file of Megatron-LM arguments on a machine without GPUs.

    python examples/launch/check.py examples/launch/llama3_8b.args --gpus 16 --data mix.yaml

Further options of Megatron-LM may follow.

If Megatron-LM is installed, it parses and checks all options of the run. The script checks that the
parallelism fits the model, the batch and the GPUs, builds Megatron's config and, on the meta
device, which takes no memory, the whole model, and prints its number of parameters. With --data it
also builds the data of the first and the last rank as the run would, and draws a batch of each.
``torchrun.sh --dry-run`` calls it.
"""

import argparse
import ast
import contextlib
import dataclasses
import io
import os
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
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.energon import WorkerConfig

from energon_ext import (
    ConfigError,
    ExactDataLoader,
    PackedTaskEncoder,
    get_train_dataset,
    load_tokenizer,
)
from energon_ext.megatron import add_energon_args, enable_cpu, gpt_layer_spec
from energon_ext.megatron.megatron_lm_arguments import check_arguments

#: Arguments of Megatron-LM -> config fields with a different name.
RENAMED = {"num_experts": "num_moe_experts", "norm_epsilon": "layernorm_epsilon"}
SWIGLU = {"gated_linear_unit": True, "activation_func": F.silu}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("arguments", type=Path)
    parser.add_argument("--gpus", type=int, required=True)
    parser.add_argument("--data", type=Path, help="a metadataset")
    parser.add_argument("--tokenizer", default="bytes", help="default: %(default)s")
    args, more = parser.parse_known_args()
    options = read_options(args.arguments, more)
    energon = Path(__file__).with_name("energon.args")
    paths = ["--data-path", str(args.data), "--dataloader-save", "data"]  # as torchrun.sh
    command = [*tokens_of(args.arguments), *tokens_of(energon), *paths, *more]
    try:
        print(f"options: {parse_as_megatron_lm(command, args.gpus)}")
        replicas = check_parallelism(options, args.gpus)
        if args.data is not None:
            for rank in sorted({0, replicas - 1}):
                print(first_batch(options, args.data, args.tokenizer, rank, replicas))
    except ConfigError as error:
        sys.exit(f"ConfigError: {args.arguments}: {error}")
    config = build_config(options)
    print(f"parallelism: {describe_parallelism(config)}, data {replicas}")
    model = build_model(options)
    total = sum(parameter.numel() for parameter in model.parameters())
    print(
        f"parameters: {total:,} ({total / 1e9:.2f}B), {active_parameters(model) / 1e9:.2f}B active"
    )


def tokens_of(path):
    return shlex.split(path.read_text(), comments=True)


def read_options(path, more=()):
    """Read the options of a file, and more, as a dictionary of values; flags are True."""
    options, name = {}, None
    for token in (*tokens_of(path), *more):
        if token.startswith("--"):
            name = token[2:].replace("-", "_")
            options[name] = True
        else:
            try:
                options[name] = ast.literal_eval(token)
            except (ValueError, SyntaxError):
                options[name] = token
    return options


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

    def size(kind):
        return options.get(f"{kind}_parallel_size", 1)

    tensor, pipeline, context = size("tensor_model"), size("pipeline_model"), size("context")
    experts = size("expert_model") * size("expert_tensor") * pipeline
    alignment = (2 * context if context > 1 else 1) * tensor
    replica = tensor * pipeline * context
    for name, number, divisor in (
        ("--gpus", gpus, replica),
        ("--gpus", gpus, experts),
        ("--num-experts", options.get("num_experts", 0), size("expert_model")),
        ("--num-attention-heads", options["num_attention_heads"], tensor),
        ("--num-query-groups", options["num_query_groups"], tensor),
        ("--num-layers", options["num_layers"], pipeline),
        ("--seq-length", options["seq_length"], alignment),
        ("--global-batch-size", options["global_batch_size"], max(1, gpus // replica)),
    ):
        if number % divisor:
            raise ConfigError(f"{name} {number} is not a multiple of {divisor}.")
    return gpus // replica


def first_batch(options, data, tokenizer, rank, ranks):
    """Describe the first batch of a data-parallel rank.

    Raises:
        ConfigError: the data cannot be read, or its tokenizer has more ids than the model.
    """
    tokenizer = load_tokenizer(tokenizer)
    if tokenizer.vocab_size > (ids := padded_vocab_size(options)):
        raise ConfigError(f"the tokenizer has {tokenizer.vocab_size} ids, the model only {ids}.")
    context = options.get("context_parallel_size", 1)
    dataset = get_train_dataset(
        data,
        worker_config=WorkerConfig(rank=rank, world_size=ranks, num_workers=0),
        batch_size=1,
        rows_per_step=options["global_batch_size"],
        task_encoder=PackedTaskEncoder(
            tokenizer, options["seq_length"], alignment=2 * context if context > 1 else 1
        ),
    )
    batch = next(iter(ExactDataLoader(dataset))).validate()
    tokens = batch.num_tokens - int(batch.padding_mask().sum())
    sources = ", ".join(name for name, count in batch.tokens_per_source().items() if count)
    return f"data: rank {rank} of {ranks} reads {tokens:,} tokens of {sources} first"


def build_config(options, **overrides):
    """Build Megatron's config from options."""
    fields = {field.name for field in dataclasses.fields(TransformerConfig)}
    values = {RENAMED.get(name, name): value for name, value in options.items()}
    values = {name: value for name, value in values.items() if name in fields}
    dtype = torch.bfloat16 if options.get("bf16") else torch.float32
    return TransformerConfig(
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
        moe_grouped_gemm=False,  # needs GPU kernels; the parameters are the same
        perform_initialization=False,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
    )
    with torch.device("meta"):
        return GPTModel(
            config,
            gpt_layer_spec(config),
            padded_vocab_size(options),
            options["max_position_embeddings"],
            share_embeddings_and_output_weights=not options.get(
                "untie_embeddings_and_output_weights"
            ),
            position_embedding_type=options["position_embedding_type"],
            rotary_base=options["rotary_base"],
        )


def padded_vocab_size(options):
    """Return Megatron-LM's padded vocabulary size with NullTokenizer and its special token."""
    multiple = 128 * options["tensor_model_parallel_size"]
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
