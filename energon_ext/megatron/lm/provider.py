# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Data provider for Megatron-LM launch scripts."""

import argparse
import datetime
import itertools
from typing import Any, Mapping

from megatron.core import parallel_state
from megatron.energon import TaskEncoder

from energon_ext.config.yaml_file import splits_of
from energon_ext.encoders.load import get_train_dataset, get_val_datasets, require_mixin
from energon_ext.encoders.pretrain import PackedTaskEncoder
from energon_ext.encoders.written_tokenizer import written_tokenizer
from energon_ext.errors import ConfigError, log_of
from energon_ext.megatron.broadcast import create_broadcast_groups
from energon_ext.megatron.lm.arguments import check_arguments, check_vocabulary, ramps_up
from energon_ext.megatron.lm.log import DataLog
from energon_ext.megatron.lm.loop import adapt_loop, save_for_all_stages
from energon_ext.megatron.lm.state import MegatronLMLoader, restore_together
from energon_ext.megatron.loader import data_parallel_worker_config
from energon_ext.megatron.rank_data import rank_data
from energon_ext.megatron.validation import ValidationLoader
from energon_ext.plan.cost import AttentionCost
from energon_ext.plan.lookup import find_blend
from energon_ext.state.together import on_all_ranks
from energon_ext.tokenizers.protocol import Tokenizer
from energon_ext.tokenizers.tokenizers import load_tokenizer
from energon_ext.weights import ScheduleAxis
from energon_ext.weights.axis import STEPS

logger = log_of(__name__)


def train_valid_test_dataloaders_provider(
    train_val_test_num_samples: Any,
    vp_stage: int | None = None,
    *,
    task_encoder: TaskEncoder | None = None,
    **dataset_options: Any,
) -> tuple[Any, Any, Any]:
    """Build the loaders for training, validation and test inside a Megatron-LM launch script.

    It reads Megatron-LM's arguments and those of :func:`energon_ext.megatron.add_energon_args`::

        pretrain(train_valid_test_dataloaders_provider, model_provider,
                 ModelType.encoder_or_decoder, forward_step,
                 extra_args_provider=add_energon_args)

    With megatron-core 0.18 and later see ``examples/launch/pretrain_gpt.py``. The run needs
    ``--dataloader-type external --micro-batch-size 1 --calculate-per-token-loss
    --data-path mix.yaml --dataloader-save DIR``. A packed micro-batch is one sequence of
    ``--seq-length`` positions. Unless ``--eval-iters`` is 0, validation reads the ``val`` split of
    the metadataset, and the test at the end of the run its ``test`` split, if it has one. If the
    model was loaded at an iteration > 0, the data continues from the
    state saved with it.

    Args:
        train_val_test_num_samples: ignored.
        vp_stage: virtual pipeline stage; Megatron-LM calls the provider once per stage, from 0 on,
            and the stages of a process share one loader.
        task_encoder: by default a :class:`~energon_ext.PackedTaskEncoder`. Its batches may be of
            any class; those that are no :class:`~energon_ext.PackedBatch` are not counted by
            source, and ``forward_step_func`` has to draw them.
        **dataset_options: options of Energon for both datasets, such as ``image_decode``.

    Returns:
        ``(training, validation, test)`` on ranks that load, ``(None, None, None)`` on the others.

    Raises:
        ConfigError: an argument, the YAML or a dataset is wrong.
        StateFormatError: the data state cannot be read, or only some ranks have one.
        StateMismatchError: the data state belongs to another configuration.
    """
    from megatron.training import get_args

    args = get_args()
    if vp_stage:
        return _iterators_of(vp_stage)
    loaders: list[Any] = [None, None, None]

    def build() -> None:
        check_arguments(args)
        if parallel_state.get_tensor_model_parallel_rank() == 0:
            encoder = task_encoder or _default_task_encoder(args)
            loaders[:] = _build_loaders(args, encoder, dataset_options)

    on_all_ranks(build)
    create_broadcast_groups(datetime.timedelta(minutes=args.distributed_timeout_minutes))
    training = loaders[0]
    if args.iteration > 0:
        restore_together(training, args)
    outputs = ("energon_run_dir", "tensorboard_dir", "wandb_project")
    is_logged = any(getattr(args, name, None) for name in outputs)
    adapt_loop(DataLog(training, args) if is_logged else None)
    if vp_stage is None:
        return tuple(loaders)
    # tee() keeps a batch until every stage has drawn it.
    count = args.virtual_pipeline_model_parallel_size
    data = rank_data()
    data.stage_iterators = [loader and itertools.tee(loader, count) for loader in loaders]
    data.shared_loader = training
    save_for_all_stages()
    return _iterators_of(0)


def _iterators_of(vp_stage: int) -> tuple[Any, Any, Any]:
    iterators = rank_data().stage_iterators
    training, validation, test = (stages and stages[vp_stage] for stages in iterators)
    return training, validation, test


def _build_loaders(
    args: argparse.Namespace, task_encoder: TaskEncoder, dataset_options: Mapping[str, Any]
) -> tuple[MegatronLMLoader, ValidationLoader | None, ValidationLoader | None]:
    check_vocabulary(args, task_encoder)
    planned = require_mixin(task_encoder, "Megatron-LM draws whole steps")
    if args.energon_balance and planned.cost is None:
        raise ConfigError(
            f"--energon-balance: your own {type(task_encoder).__name__} has no `cost`; set one, or "
            f"leave the option out."
        )
    if planned.schedule_axis is None:
        planned.schedule_axis = schedule_axis(args)
    own_options = {
        "worker_config": data_parallel_worker_config(args.num_workers, seed=args.seed),
        "batch_size": 1,
        "task_encoder": task_encoder,
    }
    if fixed := sorted({*own_options, "rows_per_step", "split_part"} & dataset_options.keys()):
        raise ConfigError(
            f"train_valid_test_dataloaders_provider: {fixed[0]} follows from Megatron-LM's "
            f"arguments; leave it out."
        )
    options = {**dataset_options, **own_options}
    # While the global batch grows, each round of micro-batches is one step of the plan.
    rows = None if ramps_up(args) else args.global_batch_size
    training = MegatronLMLoader(get_train_dataset(args.data_path[0], rows_per_step=rows, **options))
    if ramps_up(args):
        _check_ramp(training)
    _check_graphs(training, args)
    if args.save and not args.dataloader_save:
        logger.warning(
            "--save without --dataloader-save: checkpoints will contain the model but no data "
            "state, so a resumed run will start the data over. Give --dataloader-save DIR."
        )
    _warn_of_fp8(args)
    if not args.eval_iters:
        return training, None, None
    validation = _build_evaluation(args, "val", options)
    has_test = "test" in splits_of(args.data_path[0])
    return training, validation, _build_evaluation(args, "test", options) if has_test else None


def _build_evaluation(
    args: argparse.Namespace, split: str, options: Mapping[str, Any]
) -> ValidationLoader:
    datasets = get_val_datasets(args.data_path[0], split_part=split, **options)
    # Megatron-core 0.18 and later have a separate batch size for evaluation.
    rows = getattr(args, "eval_global_batch_size", None) or args.global_batch_size
    batches = args.eval_iters * (rows // parallel_state.get_data_parallel_world_size())
    if 0 < batches < len(datasets):  # Megatron-LM expects a loss for every source
        kind = "validation" if split == "val" else split
        raise ConfigError(
            f"--eval-iters {args.eval_iters}: a rank evaluates {batches} micro-batches, too few for"
            f" {len(datasets)} {kind} sources; raise it, or --eval-global-batch-size."
        )
    return ValidationLoader(datasets, batches)


#: Make Megatron-LM call the provider on every rank, not only on tensor-parallel rank 0.
train_valid_test_dataloaders_provider.is_distributed = True  # type: ignore[attr-defined]


def schedule_axis(args: argparse.Namespace) -> ScheduleAxis:
    """Return the schedule axis of a Megatron-LM run from its arguments.

    The run ends after ``--train-iters`` steps, and breakpoints after its end are reported. If the
    global batch grows, the end is unknown. The unit of the breakpoints is a field of the
    metadataset; ``--energon-schedule-axis`` may only repeat it.
    """
    end = None if ramps_up(args) else args.train_iters
    return ScheduleAxis(args.energon_schedule_axis, end=end or None)


def _warn_of_fp8(args: argparse.Namespace) -> None:
    """Warn if a rank's positions do not fit Transformer Engine's FP8 matrices, multiples of 16."""
    ranks = args.context_parallel_size
    ranks *= args.tensor_model_parallel_size if args.sequence_parallel else 1
    positions = args.seq_length // ranks
    if getattr(args, "fp8", None) and positions % 16:
        logger.warning(
            "--fp8-format with --seq-length %d: each rank gets %d positions of a row, but FP8 "
            "matrices need a multiple of 16; make --seq-length a multiple of %d.",
            *(args.seq_length, positions, 16 * ranks),
        )


def _check_ramp(training: MegatronLMLoader) -> None:
    """Raise ConfigError for breakpoints in optimizer steps, as the global batch grows."""
    blend = find_blend(training.loader)
    if blend.clock.axis.counted == STEPS and (blend.tree.breakpoints() or blend.clock.rows):
        raise ConfigError(
            "schedule_axis: steps, with --rampup-batch-size or --step-batch-size-schedule: an "
            "optimizer step has no fixed number of rows; set `schedule_axis: tokens` in the "
            "metadataset and give its breakpoints in tokens."
        )


def _check_graphs(training: MegatronLMLoader, args: argparse.Namespace) -> None:
    """Raise ConfigError for graphs that would need other numbers of segments during the run.

    All else that Megatron-LM sizes by ``--seq-length`` stays as it is: buffers between pipeline
    stages and of tensor parallelism, the number of micro-batches, tables of positions. A
    micro-batch keeps its positions, which shorter rows divide.
    """
    rows = find_blend(training.loader).clock.rows
    if rows is not None and getattr(args, "cuda_graph_impl", None) == "local":
        raise ConfigError(
            f"{rows.where}: row_tokens: --cuda-graph-impl local replays one number of segments, "
            f"and a micro-batch of shorter rows has more; leave out one of the two."
        )


def _tokenizer(args: argparse.Namespace) -> Tokenizer:
    names = "add_bos", "add_eos", "bos_token", "eos_token"
    options = {name: getattr(args, f"energon_{name}") for name in names}
    given = {name: value for name, value in options.items() if value is not None}
    if args.energon_tokenizer is None and not given:
        return written_tokenizer(args.data_path[0])
    return load_tokenizer(args.energon_tokenizer or "bytes", **given)


def _default_task_encoder(args: argparse.Namespace) -> PackedTaskEncoder:
    cost = None
    if args.energon_balance:
        from megatron.training.arguments import core_transformer_config_from_args

        config = core_transformer_config_from_args(args)
        names = "hybrid_layer_pattern", "hybrid_override_pattern"  # the older name
        pattern = next(filter(None, (getattr(args, name, None) for name in names)), None)
        cost = AttentionCost.of_model(config, args.padded_vocab_size or 0, pattern)
    # Each context-parallel rank takes two of the equal chunks of a segment.
    ranks = parallel_state.get_context_parallel_world_size()
    return PackedTaskEncoder(
        _tokenizer(args),
        args.seq_length,
        packing=args.energon_packing,
        packing_buffer_docs=args.energon_packing_buffer_docs,
        packing_max_docs_per_bin=args.energon_packing_max_docs_per_bin,
        packing_carry=args.energon_packing_carry,
        alignment=2 * ranks if ranks > 1 else 1,
        mask_boundary_loss=args.energon_mask_boundary_loss,
        train_on_eos=args.energon_train_on_eos,
        document_numbers=getattr(args, "energon_document_losses", False),
        balance=args.energon_balance,
        cost=cost,
    )
