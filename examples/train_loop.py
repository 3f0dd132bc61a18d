# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The loop of 02 and 03: batches from any source, through model, optimizer and step of 01.

What a batch is for stands in its token_weights, so nothing here asks which task it is. A source is
an iterator over PackedBatch with save_state() and restore_state(). Data parallel only; 01 shows
tensor and pipeline parallelism.
"""

import importlib
import time
from contextlib import ExitStack
from dataclasses import dataclass

import torch
import torch.distributed as dist

from energon_ext import ConfigError
from energon_ext.megatron import RunLog
from energon_ext.state.checkpoint import CheckpointStore
from energon_ext.state.match import check_fingerprint

pretrain = importlib.import_module("01_pretrain_gpt")

#: What a resumed run may change.
FREE_ARGUMENTS = {"metadataset", "run_dir", "resume", "stop_after", "tensorboard"}
FREE_ARGUMENTS |= {"save_interval", "eval_interval"}


@dataclass
class Feed:
    """The micro-batches of one step, as 01's step takes them."""

    batches: list
    rows: int

    def __post_init__(self):
        self.micro_batches = len(self.batches)
        self._iterator = iter(self.batches)

    def __next__(self):
        return next(self._iterator)


def train(
    args, folder, model, source, *, rows, micro_batches=1, evaluate=lambda step: {}, may_begin=False
):
    """Train from the last checkpoint in a folder, or from the start, and return the last step.

    Args:
        args: what 01 takes, and resume, stop_after, save_interval.
        source: yields batches of so many rows.
        evaluate: step -> what else is to be logged.
        may_begin: a resumed run may have been stopped before it came here.
    """
    folder.mkdir(parents=True, exist_ok=True)
    optimizer = pretrain.build_optimizer(args, model)
    ranks = {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
    with ExitStack() as stack:
        store = stack.enter_context(CheckpointStore(folder / "checkpoints", **ranks))
        step = restore(store, args, model, optimizer, source, may_begin)
        log = stack.enter_context(
            RunLog(folder, step, args.train_iters, enabled=dist.get_rank() == 0)
        )
        board = None
        if log.enabled and args.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            board = stack.enter_context(SummaryWriter(folder / "tensorboard"))
        last_step = min(args.train_iters, args.stop_after or args.train_iters)
        write(log, board, step, evaluate(step))
        while step < last_step:
            step += 1
            began = time.perf_counter()
            batches = [next(source) for _ in range(micro_batches)]
            drawn = time.perf_counter()
            losses = pretrain.train_step(args, step, model, optimizer, Feed(batches, rows))
            seconds = time.perf_counter() - began
            trained = over_ranks(sum(int((batch.token_weights != 0).sum()) for batch in batches))
            metrics = {
                "train/loss": losses["loss"],
                "train/learning_rate": pretrain.learning_rate(args, step),
                "train/tokens": trained,
                **{f"rollout/{name}": value for name, value in rollout_metrics(source).items()},
                "perf/step_seconds": seconds,
                "perf/data_seconds": drawn - began,
                "perf/tokens_per_second": trained / seconds,
            }
            write(log, board, step, {**metrics, **evaluate(step)})
            if step % args.save_interval == 0 or step == last_step:
                save(store, step, args, model, optimizer, source)
    return step


def over_ranks(count):
    total = torch.tensor(count, device="cuda")  # which is the CPU where there is no GPU
    dist.all_reduce(total)
    return int(total)


def rollout_metrics(source):
    """What a source that samples says of its last batch, on this rank."""
    return getattr(source, "metrics", {})


def write(log, board, step, metrics):
    if log.enabled and metrics:
        log.write("train", step, **metrics)
        for name, value in metrics.items() if board else ():
            board.add_scalar(name, value, step)


def save(store, step, args, model, optimizer, source):
    rank = dist.get_rank()
    files = {
        f"model_rank{rank:05d}.pt": {
            "model": model.state_dict_for_save_checkpoint(),
            "optimizer": optimizer.state_dict(),
            "random": torch.get_rng_state(),
        },
        f"data_rank{rank:05d}.pt": source.save_state(),
    }
    store.save(step, files, metadata={"arguments": fixed_arguments(args)})


def restore(store, args, model, optimizer, source, may_begin):
    """Restore everything from the last checkpoint; return its step, 0 where there is none."""
    checkpoint = store.latest()
    if checkpoint is None:
        if args.resume and not may_begin:
            raise ConfigError(f"{store.root} holds no checkpoint to --resume; begin without it.")
        return 0
    if not args.resume:
        raise ConfigError(f"{store.root} holds checkpoints: --resume, or take another folder.")
    check_fingerprint(checkpoint.metadata["arguments"], fixed_arguments(args))
    state = checkpoint.load(f"model_rank{dist.get_rank():05d}.pt")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["random"])
    source.restore_state(checkpoint.load(f"data_rank{dist.get_rank():05d}.pt"))
    return checkpoint.step


def fixed_arguments(args):
    values = {name: value for name, value in vars(args).items() if name not in FREE_ARGUMENTS}
    return {**values, "world_size": dist.get_world_size()}
