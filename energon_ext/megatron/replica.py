# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The ranks that hold one copy of the model together."""

import datetime
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state


def create_replica_group(timeout: datetime.timedelta | None = None) -> dist.ProcessGroup:
    """Create the gloo group of this rank's replica, the ranks with its data-parallel rank.

    Tensor-, pipeline- and context-parallel ranks of one model train on the same answers of a
    server: see ``replica_group`` of :class:`~energon_ext.rl.RLDataset`. All ranks of the run call
    this together, once, after ``initialize_model_parallel``.

    Args:
        timeout: longest time that ranks wait for the first one; by default two hours. It must be
            longer than a call of the sampler and than ``sync_weights``.
    """
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, parallel_state.get_data_parallel_rank())
    ranks = [[r for r, each in enumerate(found) if each == own] for own in sorted({*found})]
    timeout = timeout or datetime.timedelta(hours=2)
    group, _ = dist.new_subgroups_by_enumeration(ranks, timeout=timeout, backend="gloo")
    return group
