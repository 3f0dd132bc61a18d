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
import contextlib
import io
import os
import sys
import types
from pathlib import Path

import torch
import torch.distributed as dist
from launch_options import check_parallelism, padded_vocab_size, read_options, tokens_of
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.energon import WorkerConfig
from meta_model import describe_model

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
from energon_ext.megatron import add_energon_args, enable_cpu
from energon_ext.megatron.lm.arguments import check_arguments
from energon_ext.megatron.lm.script_options import MODEL_OPTIONS


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


def parse_as_megatron_lm(command, gpus):
    """Run the parsers and checks of Megatron-LM and energon_ext; return a description.

    Raises:
        ConfigError: an option is unknown or was rejected.
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
    args = parse_args(_add_arguments)
    args.world_size = gpus
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            validate_args(args)
    except (AssertionError, RuntimeError, ValueError) as error:
        raise ConfigError(f"Megatron-LM rejects the options: {error}") from error
    check_arguments(args)
    MODEL_OPTIONS.check(args)
    return "accepted by Megatron-LM"


def _add_arguments(parser):
    def reject(message):  # the parser's own function prints every option there is
        raise ConfigError(f"Megatron-LM rejects the options: {message}")

    parser.error = reject
    return add_energon_args(parser)


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


if __name__ == "__main__":
    enable_cpu()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1, inference_rng_tracker=True)
    main()
