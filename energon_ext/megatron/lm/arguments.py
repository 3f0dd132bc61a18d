# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Options of a Megatron-LM run: those added here, and rules for Megatron-LM's own."""

import argparse
from typing import Any, Iterator

from megatron.core import parallel_state
from megatron.energon import TaskEncoder

from energon_ext.errors import ConfigError
from energon_ext.megatron.lm.script_options import STEP_OPTIONS, flag
from energon_ext.packing import PACKERS
from energon_ext.weights.axis import UNITS


def add_energon_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add this package's arguments to Megatron-LM's parser, as its ``extra_args_provider``.

    Example:
        >>> import argparse
        >>> parser = add_energon_args(argparse.ArgumentParser())
        >>> parser.parse_args(["--energon-packing", "sequential"]).energon_packing
        'sequential'
    """
    add = parser.add_argument_group(title="energon_ext").add_argument
    flag: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
    add("--dataloader-save", help="Folder for the data state, saved with every model checkpoint.")
    add("--dataloader-load", help="Folder to resume the data from; default: --dataloader-save.")
    add("--energon-run-dir", help="Folder for metrics.jsonl, which `energon-ext report` reads.")
    add(
        "--energon-batch-hash",
        help="Log a hash of the rows of every step, to compare runs.",
        default=True,
        **flag,
    )
    add(
        "--energon-document-losses",
        action="store_true",
        help="Write the loss of every document to the --energon-run-dir.",
    )
    add(
        "--energon-tokenizer",
        help="`bytes`, a tokenizer.json, a folder or a Hugging Face name; default: the one that "
        "wrote the token files, else bytes.",
    )
    for token in ("bos", "eos"):
        name = f"{token.upper()} token"
        add(f"--energon-{token}-token", help=f"The {name} of a bare tokenizer.json.")
        add(f"--energon-add-{token}", help=f"Add the {name} to every document.", **flag)
    add(
        "--energon-schedule-axis",
        choices=UNITS,
        help="Unit of the breakpoints; may only repeat the field schedule_axis of the metadataset.",
    )
    add("--energon-packing", choices=list(PACKERS), default="bin")
    add("--energon-packing-buffer-docs", type=int, default=512)
    add("--energon-packing-max-docs-per-bin", type=int)
    add("--energon-packing-carry", type=float)
    add(
        "--energon-mask-boundary-loss",
        help="No loss where input and label belong to different documents; default: with `bin`.",
        **flag,
    )
    add("--energon-train-on-eos", default=True, **flag)
    add(
        "--energon-balance",
        choices=["attention"],
        help="Distribute the rows of a step over ranks and micro-batches by their cost.",
    )
    return parser


def ramps_up(args: argparse.Namespace) -> bool:
    """True if the global batch grows during the run."""
    schedules = ("rampup_batch_size", "step_batch_size_schedule")
    return any(getattr(args, name, None) is not None for name in schedules)


def check_arguments(args: argparse.Namespace) -> None:
    """Raise ConfigError for options that cannot work with packed rows of a metadataset."""
    STEP_OPTIONS.check(args)
    for name, found, allowed, is_right in _rules(args):
        if not is_right:
            raise ConfigError(f"{name} must be {allowed} with energon_ext, got {found!r}.")


def check_vocabulary(args: argparse.Namespace, task_encoder: TaskEncoder) -> None:
    """Raise ConfigError if the tokenizer has ids without an embedding in the model."""
    needed = getattr(getattr(task_encoder, "tokenizer", None), "vocab_size", None)
    embeddings = getattr(args, "padded_vocab_size", None)
    if isinstance(needed, int) and embeddings is not None and needed > embeddings:
        raise ConfigError(
            f"--vocab-size gives the model {embeddings} embeddings, with padding, but the data's "
            f"tokenizer has ids up to {needed - 1}; set --vocab-size {needed}, or use the "
            f"tokenizer that the model was trained with."
        )


def _rules(args: argparse.Namespace) -> Iterator[tuple[str, Any, str, bool]]:
    """Yield each option, its value, the allowed values, and whether the value is one of them."""
    context, tensor = args.context_parallel_size, args.tensor_model_parallel_size
    multiple = (2 * context if context > 1 else 1) * (tensor if args.sequence_parallel else 1)
    replicas = parallel_state.get_data_parallel_world_size()
    yield "--data-path", args.data_path, "one metadataset", len(args.data_path or ()) == 1
    for name in ("micro_batch_size", "eval_micro_batch_size"):
        size = getattr(args, name, None)
        yield flag(name), size, "1", size in (None, 1)
    batch = args.global_batch_size
    yield "--global-batch-size", batch, f"a multiple of {replicas}", batch % replicas == 0
    if hasattr(args, "step_batch_size_schedule"):  # megatron-core 0.18 and later
        ramp = getattr(args, "rampup_batch_size", None)
        allowed = "left out (it is ignored; use --step-batch-size-schedule)"
        yield "--rampup-batch-size", ramp, allowed, ramp is None
    if getattr(args, "energon_document_losses", False):
        folder = args.energon_run_dir
        yield "--energon-run-dir", folder, "given, for --energon-document-losses,", bool(folder)
    kind = args.dataloader_type
    yield "--dataloader-type", kind, "external", kind == "external"
    # Without it the loss of a step is the mean of the means of its micro-batches.
    yield "--calculate-per-token-loss", False, "given", args.calculate_per_token_loss
    # Context and sequence parallelism cut a row into equal parts.
    length = args.seq_length
    yield "--seq-length", length, f"a multiple of {multiple}", length % multiple == 0
    mode = getattr(args, "cp_partition_mode", None)
    yield "--cp-partition-mode", mode, "zigzag", context == 1 or mode in (None, "zigzag")
    if getattr(args, "mtp_num_layers", None):
        yield "--context-parallel-size", context, "1, as --mtp-num-layers is used,", context == 1
    # With more shards, ranks of one replica would train on the same rows.
    shards = tensor * getattr(args, "gtp_weight_remat_size", 1)
    yield "--tensor-parallel-num-weight-shards", shards, f"{tensor}", shards == tensor
    graphs = getattr(args, "cuda_graph_impl", None)
    if graphs not in (None, "none"):
        # Graphs of whole iterations copy batches that are dictionaries.
        is_right = graphs in ("local", "transformer_engine")
        yield "--cuda-graph-impl", graphs, "local or transformer_engine", is_right
    if graphs == "local":
        documents = args.energon_packing_max_docs_per_bin
        allowed = "given, since a CUDA graph replays one number of segments,"
        yield "--energon-packing-max-docs-per-bin", documents, allowed, documents is not None
    if graphs == "transformer_engine":
        name, modules = _graph_modules(args)
        allowed = "mlp, as graphs of Transformer Engine get neither segments nor the padding mask,"
        yield flag(name), modules, allowed, modules == ["mlp"]


def _graph_modules(args: argparse.Namespace) -> tuple[str, list[str]]:
    """Return the option for the modules in CUDA graphs, and their names; none means all."""
    name = "cuda_graph_modules" if hasattr(args, "cuda_graph_modules") else "cuda_graph_scope"
    found = getattr(args, name, None) or []
    modules = found.split(",") if isinstance(found, str) else found
    return name, [getattr(module, "name", module) for module in modules]
