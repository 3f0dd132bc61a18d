# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Data of a run on each of its ranks, also on those that load no data and so have no loader.

It belongs to the tensor-parallel group of the rank and ends with it. A run that starts again in the
same process creates new groups, so it finds nothing of the run before.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from megatron.core import parallel_state


@dataclass
class RankData:
    """Data of a run on this rank.

    Attributes:
        channel: carries batches from the first tensor-parallel rank to the others.
        waiting: for each virtual stage, the micro-batches that it has not taken yet: as drawn, on
            the rank that draws, and as returned.
        recomputed: for each router in an activation checkpoint, the given experts of the
            micro-batches whose backward pass has not come yet.
        stage_iterators: in a Megatron-LM run, the iterators of each loader, one per virtual stage.
        shared_loader: in a Megatron-LM run, the training loader that the virtual stages share.
        log: in a Megatron-LM run, the log of what it reads, if there is one.
        context_groups: the ranks with which this one shares micro-batches of a layout, by size.
    """

    channel: Any = None
    waiting: list[deque[tuple[Any, Any]]] = field(default_factory=list)
    recomputed: WeakKeyDictionary[Any, deque[Any]] = field(default_factory=WeakKeyDictionary)
    stage_iterators: list[Any] = field(default_factory=list)
    shared_loader: Any = None
    log: Any = None
    context_groups: dict[int, dist.ProcessGroup] = field(default_factory=dict)


_data: WeakKeyDictionary[dist.ProcessGroup, RankData] = WeakKeyDictionary()


def rank_data() -> RankData:
    """Return what this rank keeps for the run of its present groups."""
    return _data.setdefault(parallel_state.get_tensor_model_parallel_group(), RankData())
