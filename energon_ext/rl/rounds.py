# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Agreement of the ranks of a run that sample in rounds.

In a round, every data-parallel rank that needs more groups takes prompts from the shared plan. So
the ranks must know of each other who takes some, and whether one of them failed: ranks that went on
alone would be at another place of the plan, and wait for the others forever.
"""

from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist
from megatron.energon import WorkerConfig

from energon_ext.errors import ConfigError, SamplerError
from energon_ext.state.together import collective_device, on_all_ranks


class Need(IntEnum):
    """Needs of a rank in a round."""

    NOTHING = 0
    ANSWERS = 1  # to prompts that it has drawn before
    PROMPTS = 2  # and their answers
    FAILED = 3


class Rounds:
    """The ranks that sample together.

    Args:
        workers: data-parallel rank and group of this process.
        sampler: has a method ``agree`` if some ranks must call it together.
        replica_group: ranks of one model that share answers, if not by ``agree``.

    Raises:
        ConfigError: the data-parallel ranks cannot talk to each other.
    """

    def __init__(self, workers: WorkerConfig, sampler: Any, replica_group: Any):
        self._rank, self._size = workers.rank, workers.world_size
        self._group, self._replica = workers.data_parallel_group, replica_group
        self._agree = getattr(sampler, "agree", None)
        found = dist.get_world_size(self._group) if dist.is_initialized() else 1
        if self._size > 1 and found != self._size:
            raise ConfigError(
                f"RLDataset: {self._size} data-parallel ranks in worker_config share the prompts, "
                f"but its data_parallel_group has {found}; initialize torch.distributed, and use "
                f"energon_ext.megatron.data_parallel_worker_config()."
            )

    def agree(self, need: Need, error: Exception | None = None) -> list[Need]:
        """Return what each data-parallel rank needs; if one of the ranks failed, all raise.

        Raises:
            SamplerError: another rank failed; own errors are raised as they are.
        """
        if error is not None:
            need = Need.FAILED
        # A rank of a model that fails alone must be heard by the other ranks of this model.
        if self._agree is not None:
            has_failed = self._agree(int(need == Need.FAILED)) > 0
        elif self._replica is not None:
            has_failed = any(on_all_ranks(lambda: need == Need.FAILED, self._replica))
        else:
            has_failed = need == Need.FAILED
        needs = self._gather(Need.FAILED if has_failed else need)
        if error is not None:
            raise error
        if Need.FAILED in needs:
            raise SamplerError("another rank failed to sample; see its error")
        return needs

    def _gather(self, need: Need) -> list[Need]:
        if self._size == 1:
            return [need]
        own = torch.tensor([int(need)], device=collective_device())
        found = [torch.empty_like(own) for _ in range(self._size)]
        dist.all_gather(found, own, group=self._group)
        return [Need(int(each)) for each in found]
