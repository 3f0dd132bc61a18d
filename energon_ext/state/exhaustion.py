# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The end of a run whose sources all have a ``max_epochs``, at the same batch on every rank."""

from __future__ import annotations

from typing import Mapping

import torch
import torch.distributed as dist
from megatron.energon import WorkerConfig

from energon_ext.errors import DataExhaustedError
from energon_ext.state.together import collective_device


def end_together(
    has_batch: bool,
    limits: Mapping[str, int],
    batch_index: int,
    worker_config: WorkerConfig,
    *,
    is_planned: bool,
) -> None:
    """Raise on every data-parallel rank where one has no batch left.

    Ranks that follow one plan end at the same batch by themselves. Others call this together,
    since a rank that went on alone would wait for the gradients of the others for ever.

    Args:
        has_batch: whether this rank has one.
        limits: ``max_epochs`` of each source, for the message.
        batch_index: of the batch that is not there.
        worker_config: of the dataset; names the ranks.
        is_planned: whether all ranks follow one plan.

    Raises:
        DataExhaustedError: on all ranks or on none.
    """
    has_ended = not has_batch
    if not is_planned:
        has_ended = _on_any_rank(has_ended, worker_config)
    if not has_ended:
        return
    rank = "another" if has_batch else "this"
    listed = ", ".join(f"{key}: {limit}" for key, limit in limits.items())
    raise DataExhaustedError(
        f"Every source has reached its max_epochs ({listed}): {rank} data-parallel rank has no "
        f"batch {batch_index}. Train for fewer steps, raise a limit, or leave one out."
    )


def _on_any_rank(here: bool, worker_config: WorkerConfig) -> bool:
    if worker_config.world_size == 1 or not dist.is_initialized():
        return here
    anywhere = torch.tensor(int(here), device=collective_device())
    dist.all_reduce(anywhere, dist.ReduceOp.MAX, group=worker_config.data_parallel_group)
    return bool(anywhere)
