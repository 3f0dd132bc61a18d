# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Read the options of a launch, and check sizes that depend on each other, without Megatron-LM."""

import ast
import contextlib
import re
import shlex

from energon_ext import ConfigError

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


def tokens_of(path):
    return shlex.split(path.read_text(), comments=True)


def value_of(token):
    """Return the value of a token: a number, a list such as ``([0]*3+[1]*58)``, or the token."""
    with contextlib.suppress(ValueError, SyntaxError):
        return ast.literal_eval(token)
    if re.fullmatch(r"\(?(\[[\d,]+\](\*\d{1,4})?\+?)+\)?", token):
        parts = re.findall(r"\[([\d,]+)\](?:\*(\d+))?", token)
        return [int(n) for part, times in parts for n in part.split(",") * int(times or 1)]
    return token


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


def padded_vocab_size(options):
    """Return Megatron-LM's padded vocabulary size with NullTokenizer and its special token.

    Raises:
        ConfigError: it comes from a tokenizer's files.
    """
    if "vocab_size" not in options:
        raise ConfigError("--vocab-size is missing: give the number of the tokenizer's ids.")
    multiple = options["make_vocab_size_divisible_by"] * options["tensor_model_parallel_size"]
    return -(-(options["vocab_size"] + 1) // multiple) * multiple
