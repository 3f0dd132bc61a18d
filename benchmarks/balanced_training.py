# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Time saved by balancing rows by cost: training steps of two processes, in both orders by turns.

The model of the examples is small and has rows of 2048 tokens, so that attention is a visible part
of a step. There are two layouts: two data-parallel ranks with four rows each, and two pipeline
stages that process the eight rows one by one. Both orders read the same rows in every step; a step
takes as long as its slowest rank. The prediction is the ratio of the busiest ranks' costs.
"""

import os
import socket
import tempfile
import time
from argparse import Namespace
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from corpora import AnyTokens, write_token_file
from megatron.energon import WorkerConfig
from timing import markdown

from energon_ext import ExactDataLoader, PackedTaskEncoder, get_train_dataset
from energon_ext.plan.cost import AttentionCost

SEQ_LEN, ROWS, STEPS, VOCABULARY = 2048, 8, 8, 512
LAYOUTS = {"data parallel": {}, "pipeline parallel": {"pipeline_model_parallel_size": 2}}


def run():
    with tempfile.TemporaryDirectory() as name:
        rng = np.random.default_rng(0)
        lengths = np.clip(np.exp(rng.normal(5.5, 1.6, 6000)), 8, 8000).astype(int)
        documents = [rng.integers(VOCABULARY, size=n).astype(np.uint16) for n in lengths]
        write_token_file(f"{name}/tokens", documents)
        mix = Path(name) / "mix.yaml"
        mix.write_text(
            "__module__: energon_ext\n__class__: ScheduledMetadataset\n"
            "splits: {train: {path: tokens}}\n"
        )
        rows = [(layout, *both_ranks(mix, sizes)) for layout, sizes in LAYOUTS.items()]
    header = ("", "s per step, natural", "balanced", "balanced / natural", "predicted")
    return markdown(f"Two processes, {ROWS} rows of {SEQ_LEN}", header, rows)


def both_ranks(mix, sizes):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with ProcessPoolExecutor(2, get_context("spawn")) as processes:
        jobs = [processes.submit(train, rank, port, mix, sizes) for rank in range(2)]
        seconds, costs = zip(*(job.result() for job in jobs))
    natural, even = np.median(np.max(seconds, axis=0), axis=1)  # of the slower rank, by order
    predicted = float("nan")
    if not sizes:
        busiest = np.max(costs, axis=0).sum(axis=1)
        predicted = round(busiest[1] / busiest[0], 3)
    return round(natural, 3), round(even, 3), round(even / natural, 3), predicted


def train(rank, port, mix, sizes):
    """Return the seconds and costs of this rank's steps, as [order][step]."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE="2",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron_gpt import build_model, start_megatron

    from energon_ext.megatron import forward_step

    torch.set_num_threads(1)
    args = Namespace(
        seed=0,
        num_layers=2,
        hidden_size=64,
        seq_length=SEQ_LEN,
        **{"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, **sizes},
    )
    start_megatron(args)
    model = build_model(args, VOCABULARY)
    cost = AttentionCost.of_model(model.config, VOCABULARY)
    replicas = parallel_state.get_data_parallel_world_size()
    replica = parallel_state.get_data_parallel_rank()
    orders = [
        iter(loader(mix, replica, replicas, balance, cost)) for balance in (None, "attention")
    ]
    seconds, costs = ([], []), ([], [])
    for step in range(STEPS + 1):
        for number, batches in enumerate(orders):
            step_batches = [next(batches) for _ in range(ROWS // replicas)]
            dist.barrier()
            begin = time.perf_counter()
            model.zero_grad_buffer()
            get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=iter(step_batches),
                model=[model],
                num_microbatches=len(step_batches),
                seq_length=SEQ_LEN,
                micro_batch_size=1,
                forward_only=False,
            )
            dist.barrier()
            if step:  # the first step is a warm-up
                seconds[number].append(time.perf_counter() - begin)
                costs[number].append(sum(cost_of(batch, cost) for batch in step_batches))
    return seconds, costs


def cost_of(batch, cost):
    return float(cost(np.diff(batch.cu_seqlens.numpy())).sum())


def loader(mix, rank, ranks, balance, cost):
    dataset = get_train_dataset(
        mix,
        worker_config=WorkerConfig(rank=rank, world_size=ranks, num_workers=0),
        batch_size=1,
        rows_per_step=ROWS,
        task_encoder=PackedTaskEncoder(
            AnyTokens(), SEQ_LEN, balance=balance, cost=cost if balance else None
        ),
    )
    return ExactDataLoader(dataset)
