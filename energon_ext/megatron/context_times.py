# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Measure how long micro-batches take on context-parallel ranks, for the layout of steps."""

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func

from energon_ext.arguments import check_integer
from energon_ext.batch.collate import BatchAssembler
from energon_ext.batch.packed_batch import PackedBatch
from energon_ext.batch.rows import Row
from energon_ext.errors import ConfigError
from energon_ext.megatron.moe import unwrap
from energon_ext.megatron.step import forward_step
from energon_ext.plan.context_cost import ContextTime
from energon_ext.plan.layout import segment_alignment
from energon_ext.state.files import write_file
from energon_ext.state.together import collective_device


def measure_context_times(
    model: torch.nn.Module,
    path: str | Path,
    *,
    sizes: Sequence[int],
    budget: int,
    alignment: int = 1,
    micro_batches: Mapping[int, Sequence[Sequence[int]]] | None = None,
    repeats: int = 3,
) -> list[ContextTime]:
    """Time forward and backward passes of micro-batches, and write them as JSON lines.

    All blocks of a size run the same micro-batch at once, as in training. The time is that of the
    slowest rank, the shortest of ``repeats``, after one that is not timed. With pipeline stages it
    is the time over all stages. Gradients are reset afterwards. All ranks call this together.

    Args:
        model: a model as it is trained, after
            :func:`~energon_ext.megatron.follow_context_groups`, and before it is wrapped in
            ``DistributedDataParallel``, whose collectives do not belong to a micro-batch.
        path: file to write, on rank 0.
        sizes, budget, alignment: see :class:`~energon_ext.plan.layout.ContextOptions`.
        micro_batches: lengths of the documents of each micro-batch, by size; by default a document
            of the whole budget, of a half and of an eighth, and 8 and 32 documents that fill it.
        repeats: timed runs of each micro-batch.

    Returns:
        The times, equal on all ranks, with lengths that include what aligns documents.

    Raises:
        ConfigError: virtual pipeline stages, a wrapped model, or groups that were not created.
    """
    check_integer("repeats", repeats, 1)
    if hasattr(model, "module"):
        raise ConfigError(
            f"measure_context_times: a {type(model).__name__} found; measure the model before it "
            f"is wrapped, since its collectives do not belong to a micro-batch."
        )
    if (parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1) > 1:
        raise ConfigError(
            "measure_context_times: virtual pipeline stages run several micro-batches at once; "
            "measure without them."
        )
    times = []
    for size in sizes:
        listed = (micro_batches or {}).get(size) or _lengths(size * budget)
        for lengths in listed:
            batch = _batch(lengths, size, alignment)
            taken = [_run(model, batch) for _ in range(repeats + 1)][1:]
            multiple = segment_alignment(size, alignment)
            positions = [length + -length % multiple for length in lengths]
            seconds = _slowest(taken)
            times.append(ContextTime(context_size=size, lengths=positions, seconds=seconds))
    for parameter in model.parameters():
        parameter.grad = None
    if dist.get_rank() == 0:
        lines = [json.dumps(each.to_json()) + "\n" for each in times]
        write_file(Path(path), "".join(lines).encode())
    return times


def _lengths(positions: int) -> list[list[int]]:
    """Return lengths of documents, alone and together, that fill up to some positions."""
    parts = {1: [1], 2: [1], 8: [1, 8], 32: [32]}
    return [
        [positions // part] * count
        for part, counts in parts.items()
        for count in counts
        if positions // part
    ]


def _batch(lengths: Sequence[int], size: int, alignment: int) -> PackedBatch:
    multiple = segment_alignment(size, alignment)
    # One token more is only a label: a document then has as many positions as its length says.
    row = Row([np.zeros(length, np.int64) for length in lengths], source="measured")
    row.slices[-1] = np.zeros(lengths[-1] + 1, np.int64)
    batch = BatchAssembler(multiple, alignment=multiple).fitting(row)([row], ["measured"])
    batch.context_size = size
    return batch


def _run(model: torch.nn.Module, batch: PackedBatch) -> float:
    """Return the seconds of one micro-batch on this rank."""
    config = unwrap(model).config
    finalize, config.finalize_model_grads_func = config.finalize_model_grads_func, None
    loads = parallel_state.get_tensor_model_parallel_rank() == 0
    try:
        dist.barrier()
        begin = time.perf_counter()
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter([batch]) if loads else None,
            model=[model],
            num_microbatches=1,
            seq_length=batch.num_tokens,
            micro_batch_size=1,
            forward_only=False,
        )
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter() - begin
    finally:
        config.finalize_model_grads_func = finalize


def _slowest(seconds: Sequence[float]) -> float:
    """Return the shortest time of the slowest rank."""
    found = torch.tensor(seconds, dtype=torch.float64, device=collective_device())
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return float(found.min())
