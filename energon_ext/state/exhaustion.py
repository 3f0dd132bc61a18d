# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The end of a run whose sources all have a ``max_epochs``, at the same batch on every rank."""

from __future__ import annotations

from typing import Mapping

import torch
import torch.distributed as dist
from megatron.energon import WorkerConfig

from energon_ext.errors import DataExhaustedError


def end_together(
    exhausted: bool, worker_config: WorkerConfig, caps: Mapping[str, int], batch_index: int
) -> None:
    """Raise on every data-parallel rank where one has no batch left; they call this together.

    A rank that went on alone would wait for the gradients of the others for ever.

    Args:
        exhausted: whether this rank has no batch left.
        worker_config: of the dataset; names the ranks.
        caps: ``max_epochs`` of each source, for the message.
        batch_index: of the batch that is not there.

    Raises:
        DataExhaustedError: on all ranks or on none.
    """
    if _on_any_rank(exhausted, worker_config):
        rank = "this" if exhausted else "another"
        listed = ", ".join(f"{key}: {cap}" for key, cap in caps.items())
        raise DataExhaustedError(
            f"Every source has reached its max_epochs ({listed}): {rank} data-parallel rank has no "
            f"batch {batch_index}. Train for fewer steps, raise a cap, or leave one out."
        )


def _on_any_rank(here: bool, worker_config: WorkerConfig) -> bool:
    if worker_config.world_size == 1 or not dist.is_initialized():
        return here
    device = torch.cuda.current_device() if torch.cuda.is_available() else "cpu"
    anywhere = torch.tensor(int(here), device=device)
    dist.all_reduce(anywhere, dist.ReduceOp.MAX, group=worker_config.data_parallel_group)
    return bool(anywhere)
