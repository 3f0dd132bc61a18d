# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""A few real training steps under any layout, with the same global batches in each."""

import json

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func

from energon_ext.megatron import forward_step, mean_losses
from tests.megatron import processes
from tests.megatron.small_gpt import (
    VOCABULARY,
    megatron,
    model_parallel,
    small_config,
    small_model,
    synthetic_batch,
)

STEPS = 2
MICRO_BATCHES = 4


def train(sizes, config, steps=STEPS, draw=None, step_func=forward_step):
    """Return losses and gradient norms of a few steps; no loss on ranks that do not compute it.

    Args:
        draw: returns the micro-batches of a replica; called with the step, the replica's number
            and the number of replicas.
        step_func: runs a micro-batch.
    """
    with model_parallel(**sizes):
        # Megatron clips in float32 only.
        clip_grad = 0.0 if config.get("params_dtype") == torch.float64 else 1.0
        model, optimizer = trainable(small_config(**sizes, **config), clip_grad=clip_grad, **SGD)
        return [
            train_step(model, optimizer, step, draw or synthetic, step_func)
            for step in range(steps)
        ]


#: Plain descent: Adam's first steps do not depend on the size of the gradient.
SGD = {"optimizer": "sgd", "lr": 0.5, "sgd_momentum": 0.0}


def trainable(config, vocabulary=VOCABULARY, **options):
    """Return a small model wrapped for training, and its optimizer."""
    model = small_model(config, vocabulary=vocabulary)
    model = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
    config.finalize_model_grads_func = finalize_model_grads
    return model, get_megatron_optimizer(OptimizerConfig(**options), [model])


def synthetic(step, replica, replicas):
    # Micro-batches differ in loss and count, so that a mean of means would be wrong.
    seeds = range(step * MICRO_BATCHES + replica, (step + 1) * MICRO_BATCHES, replicas)
    return [synthetic_batch(seed) for seed in seeds]


def train_step(model, optimizer, step, draw, step_func=forward_step):
    replicas = parallel_state.get_data_parallel_world_size()
    replica = parallel_state.get_data_parallel_rank()
    model.zero_grad_buffer()
    optimizer.zero_grad()
    reports = run_schedule(model, draw(step, replica, replicas), step_func)
    _, gradient_norm, _ = optimizer.step()
    return {**mean_losses(reports), "gradient_norm": gradient_norm}


def run_schedule(model, batches, step_func=forward_step, forward_only=False):
    """Return the reports of all micro-batches on the last pipeline stage."""
    loads = parallel_state.get_tensor_model_parallel_rank() == 0
    return get_forward_backward_func()(
        forward_step_func=step_func,
        data_iterator=iter(batches) if loads else None,
        model=[model],
        num_microbatches=len(batches),
        seq_length=batches[0].num_tokens,
        micro_batch_size=1,
        forward_only=forward_only,
    )


def position_losses(model, batch):
    """Return the loss of every position on the last pipeline stage, None on the others."""

    def step(data_iterator, model):
        output, _ = forward_step(data_iterator, model)
        return output, lambda output: (output.sum(), {"losses": output.detach().clone()})

    with torch.no_grad():
        reports = run_schedule(model, [batch], step, forward_only=True)
    return reports[0]["losses"].flatten().tolist() if reports else None


def run_ranks(world_size, target, folder):
    """Run ``target()`` on new ranks; return its result on each."""
    errors = [folder / f"stderr{rank}" for rank in range(world_size)]
    started = [
        processes.start(_run_rank, (rank, world_size, target, folder), errors[rank])
        for rank in range(world_size)
    ]
    codes = processes.finish(started)
    assert not any(codes), "\n".join(error.read_text()[-3000:] for error in errors)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(world_size)]


def _run_rank(rank, world_size, target, folder):
    store = dist.FileStore(str(folder / "store"), world_size)
    with megatron(rank, world_size, store):
        parallel_state.destroy_model_parallel()
        results = target()
        parallel_state.initialize_model_parallel()
    (folder / f"rank{rank}.json").write_text(json.dumps(results))
