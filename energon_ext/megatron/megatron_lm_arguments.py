# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The options of a Megatron-LM run: those that are added, and those of its own that must be so."""

import argparse
from typing import Any, Iterator

from megatron.core import parallel_state

from energon_ext.errors import ConfigError
from energon_ext.packing import PACKERS
from energon_ext.weights.axis import UNITS

#: Options of Megatron-LM that would fail later, or be passed over in silence; and why.
LEFT_OUT = {
    **dict.fromkeys(
        ("train_data_path", "valid_data_path", "test_data_path", "per_split_data_args_path"),
        "one metadataset has the splits of --data-path",
    ),
    **dict.fromkeys(("mock_data", "fim_data", "sft"), "it chooses a dataset of Megatron-LM's own"),
    "perform_rl_step": "it replaces the data by rollouts of its own; use energon_ext.rl",
    "eod_mask_loss": "--energon-mask-boundary-loss says where labels cross documents",
    "full_validation": "packing counts batches only by drawing them; use --eval-iters",
    **dict.fromkeys(
        ("multiple_validation_sets", "validation_set_names"),
        "the losses of single sources are reported without it",
    ),
    "sequence_packing_scheduler": "it packs documents, and the rows of energon_ext are packed",
    "dynamic_context_parallel": "it deals documents to groups of ranks, and rows have one size",
    "use_varlen_dataset": "it chooses a dataset of Megatron-LM's own",
    "overlap_moe_expert_parallel_comm": "its schedule asks for a forward step in parts",
    "check_for_spiky_loss": "the losses of packed rows are not looked at for it",
    **dict.fromkeys(("enable_cuda_graph", "external_cuda_graph"), "use --cuda-graph-impl"),
}


def add_energon_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add this package's arguments to Megatron-LM's parser, as its ``extra_args_provider``.

    Example:
        >>> import argparse
        >>> parser = add_energon_args(argparse.ArgumentParser())
        >>> parser.parse_args(["--energon-packing", "sequential"]).energon_packing
        'sequential'
    """
    group = parser.add_argument_group(title="energon_ext")
    group.add_argument(
        "--dataloader-save", help="Folder for the data state, saved with every model checkpoint."
    )
    group.add_argument(
        "--dataloader-load",
        help="Folder to resume the data state from; default: that of --dataloader-save.",
    )
    group.add_argument(
        "--energon-run-dir", help="Folder for metrics.jsonl, which `energon-ext report` reads."
    )
    group.add_argument(
        "--energon-tokenizer",
        help="`bytes`, a tokenizer.json, a folder or a Hugging Face name; default: the one that "
        "wrote the token files, else bytes.",
    )
    for token in ("bos", "eos"):
        group.add_argument(
            f"--energon-{token}-token",
            help=f"The {token.upper()} token of a bare tokenizer.json; default: what it says.",
        )
        group.add_argument(
            f"--energon-add-{token}",
            action=argparse.BooleanOptionalAction,
            help=f"Put the {token.upper()} token at every document; default: the tokenizer's.",
        )
    group.add_argument(
        "--energon-schedule-axis",
        choices=UNITS,
        help="What breakpoints count. It is the field schedule_axis of the metadataset; this may "
        "only repeat it.",
    )
    group.add_argument("--energon-packing", choices=list(PACKERS), default="bin")
    group.add_argument("--energon-packing-buffer-docs", type=int, default=512)
    group.add_argument("--energon-packing-max-docs-per-bin", type=int)
    group.add_argument("--energon-packing-carry", type=float)
    group.add_argument(
        "--energon-mask-boundary-loss",
        action=argparse.BooleanOptionalAction,
        help="No loss where input and label are of different documents; default: with `bin`.",
    )
    group.add_argument(
        "--energon-train-on-eos", action=argparse.BooleanOptionalAction, default=True
    )
    group.add_argument(
        "--energon-balance",
        choices=["attention"],
        help="Deal the rows of a step to ranks and micro-batches by what they cost this model.",
    )
    return parser


def ramps_up(args: argparse.Namespace) -> bool:
    """True if the global batch grows during the run."""
    schedules = ("rampup_batch_size", "step_batch_size_schedule")
    return any(getattr(args, name, None) is not None for name in schedules)


def check_arguments(args: argparse.Namespace) -> None:
    """Raise ConfigError for what cannot work with packed rows of a metadataset."""
    for flag, found, allowed, is_right in _rules(args):
        if not is_right:
            raise ConfigError(f"{flag} must be {allowed} with energon_ext, got {found!r}.")


def check_vocabulary(args: argparse.Namespace, task_encoder: Any) -> None:
    """Raise ConfigError for a tokenizer with ids that the model has no embedding for."""
    found = getattr(getattr(task_encoder, "tokenizer", None), "vocab_size", None)
    held = getattr(args, "padded_vocab_size", None)
    if isinstance(found, int) and held is not None and found > held:
        raise ConfigError(
            f"--vocab-size gives the model {held} embeddings, with padding, but the tokenizer of "
            f"the data has ids up to {found - 1}; set --vocab-size {found}, or take the tokenizer "
            f"that the model was trained with."
        )


def _rules(args: argparse.Namespace) -> Iterator[tuple[str, Any, str, bool]]:
    """Option, what was found, what is allowed, and whether that was found."""
    context, tensor = args.context_parallel_size, args.tensor_model_parallel_size
    multiple = (2 * context if context > 1 else 1) * (tensor if args.sequence_parallel else 1)
    replicas = parallel_state.get_data_parallel_world_size()
    yield "--data-path", args.data_path, "one metadataset", len(args.data_path or ()) == 1
    for name in ("micro_batch_size", "eval_micro_batch_size"):
        size = getattr(args, name, None)
        yield _flag(name), size, "1", size in (None, 1)
    batch = args.global_batch_size
    yield "--global-batch-size", batch, f"a multiple of {replicas}", batch % replicas == 0
    if hasattr(args, "step_batch_size_schedule"):  # megatron-core 0.18 and later
        ramp = getattr(args, "rampup_batch_size", None)
        allowed = "left out (it is ignored; use --step-batch-size-schedule)"
        yield "--rampup-batch-size", ramp, allowed, ramp is None
    kind = args.dataloader_type
    yield "--dataloader-type", kind, "external", kind == "external"
    # Without it a step has the mean of its micro-batches' means.
    yield "--calculate-per-token-loss", False, "given", args.calculate_per_token_loss
    # What context and sequence parallelism cut a row into.
    length = args.seq_length
    yield "--seq-length", length, f"a multiple of {multiple}", length % multiple == 0
    if getattr(args, "mtp_num_layers", None):
        yield "--context-parallel-size", context, "1, as --mtp-num-layers is used,", context == 1
    # More would be ranks of the same replica that train on the same rows.
    shards = tensor * getattr(args, "gtp_weight_remat_size", 1)
    yield "--tensor-parallel-num-weight-shards", shards, f"{tensor}", shards == tensor
    graphs = getattr(args, "cuda_graph_impl", None)
    if graphs not in (None, "none"):
        # Of whole iterations it copies batches that are dictionaries.
        is_right = graphs in ("local", "transformer_engine")
        yield "--cuda-graph-impl", graphs, "local or transformer_engine", is_right
        documents = args.energon_packing_max_docs_per_bin
        allowed = "given, since a CUDA graph replays one number of segments,"
        yield "--energon-packing-max-docs-per-bin", documents, allowed, documents is not None
    for name, reason in LEFT_OUT.items():
        found = getattr(args, name, None)
        yield _flag(name), found, f"left out ({reason})", found in (None, False, 0, "none")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
