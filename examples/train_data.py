# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Loads the tokenizer, the training data of a rank and the validation split for the examples."""

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron_gpt import forward

from energon_ext import (
    ConfigError,
    get_train_dataset,
    get_val_datasets,
    load_tokenizer,
    written_tokenizer,
)
from energon_ext.megatron import MegatronEnergonLoader, data_parallel_worker_config
from energon_ext.megatron.validation import ValidationLoader
from energon_ext.state.together import collective_device


def build_tokenizer(args):
    """Return the tokenizer given by the options, else the one that wrote the token files."""
    special_tokens = {"eos_token": args.eos_token, "bos_token": args.bos_token}
    if args.tokenizer is None and not any(special_tokens.values()):
        return written_tokenizer(args.metadataset)
    return load_tokenizer(args.tokenizer or "bytes", **special_tokens)


def build_source(args, task_encoder):
    """Return the loader of this rank, or None if another rank of its replica loads the data."""
    set_micro_batches(args)
    if parallel_state.get_tensor_model_parallel_rank() != 0:
        return None
    dataset = get_train_dataset(
        args.metadataset,
        worker_config=data_parallel_worker_config(args.num_workers, seed=args.seed),
        batch_size=args.micro_batch_rows,
        rows_per_step=args.global_batch_rows,
        task_encoder=task_encoder,
    )
    return MegatronEnergonLoader(dataset)


def set_micro_batches(args):
    """Set the rows and the number of a data-parallel rank's micro-batches per step."""
    replicas = parallel_state.get_data_parallel_world_size()
    rows = args.micro_batch_rows or args.global_batch_rows // replicas
    if rows < 1 or args.global_batch_rows % (rows * replicas):
        raise ConfigError(
            f"--global-batch-rows must be a multiple of {rows} rows per micro-batch x {replicas} "
            f"data-parallel ranks, got {args.global_batch_rows}."
        )
    args.micro_batch_rows, args.micro_batches = rows, args.global_batch_rows // (rows * replicas)


def validation(args, task_encoder, model):
    """Return a function of the step that evaluates the split val at every ``--eval-interval``."""
    if args.eval_interval is None:
        return lambda step: {}
    loader, datasets = None, []
    if parallel_state.get_tensor_model_parallel_rank() == 0:
        datasets = get_val_datasets(
            args.metadataset,
            worker_config=data_parallel_worker_config(0, seed=args.seed),
            batch_size=args.micro_batch_rows,
            task_encoder=task_encoder,
        )
    batches_per_evaluation = _batches_per_evaluation(args, len(datasets))
    if datasets:
        loader = ValidationLoader(datasets, batches_per_evaluation)

    def evaluate(step):
        if step % args.eval_interval and step != args.train_iters:
            return {}
        batches = [next(loader) if loader else None for _ in range(batches_per_evaluation)]
        token_losses = []
        losses = forward(args, model, batches, token_losses)
        if not losses:  # on all pipeline stages but the last
            return {}
        by_source = sorted(losses["loss_by_source"].items())
        memorized = loader.memorized(batches, token_losses) if loader else {}
        return {
            "val/loss": losses["loss"],
            **{f"val/{name}": losses[name] for name in ("teacher_kl",) if name in losses},
            **{f"val/loss/{key}": loss for key, loss in by_source},
            **{f"val/memorized/{key}": value for key, value in memorized.items()},
        }

    return evaluate


def _batches_per_evaluation(args, sources):
    """Return the micro-batches of an evaluation, at least one of each source; on all ranks."""
    found = torch.tensor(sources, device=collective_device())
    dist.all_reduce(found, dist.ReduceOp.MAX)  # only ranks that load know the sources
    batches = args.eval_iters or max(4, int(found))
    if batches < int(found):
        raise ConfigError(
            f"--eval-iters {batches}: too few for {int(found)} validation sources; raise it, or "
            f"leave it out."
        )
    return batches
