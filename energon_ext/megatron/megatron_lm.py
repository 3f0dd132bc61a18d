# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The data of a Megatron-LM launch script: its options and its provider."""

from __future__ import annotations

import argparse
import logging
from typing import Any

from megatron.core import parallel_state
from megatron.energon import TaskEncoder

from energon_ext.encoders.load import get_train_dataset, get_val_datasets
from energon_ext.encoders.pretrain import PACKINGS, PackedTaskEncoder
from energon_ext.encoders.tokenizers import load_tokenizer
from energon_ext.errors import ConfigError
from energon_ext.megatron.loader import data_parallel_worker_config
from energon_ext.megatron.megatron_lm_loop import skip_packed_steps
from energon_ext.megatron.megatron_lm_state import MegatronLMLoader, restore_together
from energon_ext.megatron.validation import ValidationLoader
from energon_ext.plan.cost import AttentionCost
from energon_ext.state.together import on_all_ranks
from energon_ext.weights import ScheduleAxis
from energon_ext.weights.axis import UNITS

logger = logging.getLogger(__name__)


def train_valid_test_dataloaders_provider(
    train_val_test_num_samples: Any,
    vp_stage: int | None = None,
    *,
    task_encoder: TaskEncoder | None = None,
) -> tuple[MegatronLMLoader | None, ValidationLoader | None, None]:
    """Build the loaders for training and validation inside a Megatron-LM launch script.

    Reads Megatron-LM's arguments and those of :func:`add_energon_args`::

        pretrain(train_valid_test_dataloaders_provider, model_provider,
                 ModelType.encoder_or_decoder, forward_step,
                 extra_args_provider=add_energon_args)

    (since megatron-core 0.18 as in ``examples/launch/pretrain_gpt.py``) with ``--dataloader-type
    external --micro-batch-size 1 --calculate-per-token-loss --data-path mix.yaml
    --dataloader-save DIR``. A packed micro-batch is one sequence of
    ``--seq-length`` positions. Validation reads the ``val`` split of the metadataset, unless
    ``--eval-iters`` is 0; every evaluation sees the same batches.

    When the model was loaded at an iteration > 0, the data continues from the state saved with it.

    Args:
        train_val_test_num_samples: not needed; sources repeat and blend by weight.
        vp_stage: not needed; every virtual stage loads the same.
        task_encoder: of the user; by default a :class:`~energon_ext.PackedTaskEncoder`.

    Returns:
        ``(training, validation, None)`` on ranks that load, ``(None, None, None)`` on the others.
        Validation is None with ``--eval-iters 0``.

    Raises:
        ConfigError: an argument, the YAML or a dataset is wrong.
        StateFormatError: the data state cannot be read, or some ranks have one and others not.
        StateMismatchError: the data state belongs to another configuration.
    """
    from megatron.training import get_args

    args = get_args()
    loaders: list[Any] = [None, None]

    def build() -> None:
        _check_args(args)
        if parallel_state.get_tensor_model_parallel_rank() == 0:
            loaders[:] = _build_loaders(args, task_encoder or _default_task_encoder(args))

    on_all_ranks(build)
    training, validation = loaders
    skip_packed_steps()
    if args.iteration > 0:
        restore_together(training, args)
    return training, validation, None


def _build_loaders(
    args: argparse.Namespace, task_encoder: TaskEncoder
) -> tuple[MegatronLMLoader, ValidationLoader | None]:
    if getattr(task_encoder, "schedule_axis", None) == ScheduleAxis():  # not set by the user
        task_encoder.schedule_axis = schedule_axis(args)
    options = {
        "worker_config": data_parallel_worker_config(args.num_workers, seed=args.seed),
        "batch_size": args.micro_batch_size,
        "task_encoder": task_encoder,
    }
    training = MegatronLMLoader(
        get_train_dataset(
            args.data_path[0],
            # While the global batch grows, each round of micro-batches is a step of the plan.
            rows_per_step=None if _ramps_up(args) else args.global_batch_size,
            shuffle_buffer_size=args.energon_shuffle_buffer_docs,
            **options,
        ),
        save_every=_batches_per_save(args),
    )
    if args.save and not args.dataloader_save:
        logger.warning(
            "--save without --dataloader-save: checkpoints will hold the model and not where its "
            "data stands, so a resumed run will start the data over. Give --dataloader-save DIR."
        )
    if not args.eval_iters:
        return training, None
    validation = get_val_datasets(args.data_path[0], **options)
    return training, ValidationLoader(validation, _batches_per_evaluation(args))


#: Megatron-LM calls the provider on every rank, not only on those of tensor-parallel rank 0.
train_valid_test_dataloaders_provider.is_distributed = True  # type: ignore[attr-defined]


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
        "--dataloader-save",
        help="Folder for the data state, saved with every model checkpoint.",
    )
    group.add_argument(
        "--dataloader-load",
        help="Folder to resume the data state from; default: that of --dataloader-save.",
    )
    group.add_argument(
        "--energon-tokenizer",
        default="bytes",
        help="`bytes`, a tokenizer.json, a folder or a Hugging Face name.",
    )
    group.add_argument(
        "--energon-schedule-axis",
        choices=UNITS,
        default="steps",
        help="What the breakpoints of weight schedules count: optimizer steps, tokens of all "
        "ranks, or micro-batches of a data-parallel rank.",
    )
    group.add_argument("--energon-packing", choices=PACKINGS, default="bin")
    group.add_argument("--energon-packing-buffer-docs", type=_count, default=512)
    group.add_argument("--energon-shuffle-buffer-docs", type=_count, default=1000)
    group.add_argument(
        "--energon-balance",
        choices=["attention"],
        help="Deal the rows of a step to ranks and micro-batches by what they cost this model.",
    )
    return parser


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} found, an integer >= 0 is needed")
    return int(text)


def schedule_axis(args: argparse.Namespace) -> ScheduleAxis:
    """Return what the breakpoints of a Megatron-LM run count, from its arguments.

    The end of the run is known from ``--train-iters``; breakpoints after it are reported.

    Raises:
        ConfigError: optimizer steps are to be counted while ``--rampup-batch-size`` changes them.
    """
    unit = args.energon_schedule_axis
    if _ramps_up(args):
        if unit == "steps":
            raise ConfigError(
                "--energon-schedule-axis steps: with --rampup-batch-size an optimizer step has no "
                "fixed number of rows; count tokens."
            )
        return ScheduleAxis(unit)
    units = {
        "steps": 1,
        "tokens": args.global_batch_size * args.seq_length,
        "batches": _batches_per_step(args),
    }
    return ScheduleAxis(unit, end=(args.train_iters or 0) * units[unit] or None)


def _ramps_up(args: argparse.Namespace) -> bool:
    return getattr(args, "rampup_batch_size", None) is not None


def _batches_per_step(args: argparse.Namespace) -> int:
    replicas = parallel_state.get_data_parallel_world_size()
    return int(args.global_batch_size // (args.micro_batch_size * replicas))


def _batches_per_save(args: argparse.Namespace) -> int:
    """Batches of a rank between two saves; 1 where that changes."""
    if _ramps_up(args):
        return 1
    return max(1, (getattr(args, "save_interval", None) or 0) * _batches_per_step(args))


def _batches_per_evaluation(args: argparse.Namespace) -> int:
    replicas = parallel_state.get_data_parallel_world_size()
    # Megatron-core 0.18 and later let evaluation have sizes of its own.
    rows = getattr(args, "eval_global_batch_size", None) or args.global_batch_size
    return args.eval_iters * (rows // (args.micro_batch_size * replicas))


def _default_task_encoder(args: argparse.Namespace) -> PackedTaskEncoder:
    # Each context-parallel rank takes two of the equal chunks that a segment is cut into.
    ranks = parallel_state.get_context_parallel_world_size()
    aligned = {"alignment": 2 * ranks} if ranks > 1 else {}
    balanced: dict[str, Any] = {}
    if args.energon_balance:
        from megatron.training.arguments import core_transformer_config_from_args

        config = core_transformer_config_from_args(args)
        cost = AttentionCost.of_model(config, args.padded_vocab_size or 0)
        balanced = {"balance": args.energon_balance, "cost": cost}
    return PackedTaskEncoder(
        load_tokenizer(args.energon_tokenizer),
        args.seq_length,
        packing=args.energon_packing,
        packing_buffer_docs=args.energon_packing_buffer_docs,
        **aligned,
        **balanced,
    )


def _check_args(args: argparse.Namespace) -> None:
    context, tensor = args.context_parallel_size, args.tensor_model_parallel_size
    multiple = (2 * context if context > 1 else 1) * (tensor if args.sequence_parallel else 1)
    for flag, found, allowed, right in (
        ("--data-path", args.data_path, "one metadataset", len(args.data_path or ()) == 1),
        ("--micro-batch-size", args.micro_batch_size, "1", args.micro_batch_size == 1),
        ("--dataloader-type", args.dataloader_type, "external", args.dataloader_type == "external"),
        # Without it a step has the mean of its micro-batches' means.
        ("--calculate-per-token-loss", False, "given", args.calculate_per_token_loss),
        # What context and sequence parallelism cut a row into.
        (
            "--seq-length",
            args.seq_length,
            f"a multiple of {multiple}",
            args.seq_length % multiple == 0,
        ),
        # Megatron-LM would fail at its first save: it knows the state of one iterator only.
        (
            "--dataloader-save",
            args.dataloader_save,
            "left out, as virtual pipeline stages are used,",
            not (args.dataloader_save and args.virtual_pipeline_model_parallel_size),
        ),
        # Both count the batches of a validation set, which packing finds out only by drawing them.
        *(
            (f"--{flag.replace('_', '-')}", True, "left out", not getattr(args, flag, False))
            for flag in ("full_validation", "multiple_validation_sets")
        ),
    ):
        if not right:
            raise ConfigError(f"{flag} must be {allowed} with energon_ext, got {found!r}.")
