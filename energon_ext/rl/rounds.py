# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Agreement of the ranks of a run that sample in rounds.

In a round, every data-parallel rank that needs more groups takes prompts from the shared plan. So
the ranks must know of each other who takes some, and whether one of them failed: ranks that went on
alone would be at another place of the plan, and wait for the others forever.
"""

from collections.abc import Callable
from enum import IntEnum
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.energon import WorkerConfig

from energon_ext.errors import ConfigError, SamplerError
from energon_ext.state.together import collective_device, group_size, on_all_ranks

_Result = TypeVar("_Result")


class Need(IntEnum):
    """Needs of a rank in a round."""

    NOTHING = 0
    ANSWERS = 1  # to prompts that it has drawn before
    PROMPTS = 2  # and their answers


#: What a rank says that failed.
_FAILED = -1


class Rounds:
    """The ranks that sample together.

    Args:
        workers: data-parallel rank and group of this process.
        sampler: has a method ``agree`` if some ranks must call it together.
        replica_group: ranks of one model that share answers, if not by ``agree``.

    Raises:
        ConfigError: the data-parallel ranks cannot talk to each other, or both are given.
    """

    def __init__(self, workers: WorkerConfig, sampler: Any, replica_group: Any):
        if replica_group is not None and hasattr(sampler, "agree"):
            raise ConfigError(
                f"replica_group: the ranks of a {type(sampler).__name__} sample together; leave "
                f"replica_group out."
            )
        self._size = workers.world_size
        self._group, self._replica = workers.data_parallel_group, replica_group
        self._agree = getattr(sampler, "agree", None)
        found = group_size(self._group)
        if self._size > 1 and found != self._size:
            raise ConfigError(
                f"RLDataset: {self._size} data-parallel ranks in worker_config share the prompts, "
                f"but its data_parallel_group has {found}; initialize torch.distributed, and use "
                f"energon_ext.megatron.data_parallel_worker_config()."
            )

    def agree(self, own: int, error: Exception | None = None) -> list[int]:
        """Return what each data-parallel rank says; if one of the ranks failed, all raise.

        Args:
            own: what this rank says, >= 0: a :class:`Need`, or a count.
            error: why this rank failed, if it did.

        Raises:
            SamplerError: another rank failed; own errors are raised as they are.
        """
        has_failed = error is not None
        # A rank of a model that fails alone must be heard by the other ranks of this model.
        if self._agree is not None:
            has_failed = self._agree(int(has_failed)) > 0
        elif self._replica is not None:
            has_failed = any(on_all_ranks(lambda: error is not None, self._replica))
        found = self._gather(_FAILED if has_failed else own)
        if error is not None:
            raise error
        if _FAILED in found:
            raise SamplerError("another rank failed; see its error")
        return found

    def run(self, work: Callable[[], _Result]) -> _Result:
        """Return the result of some work; if it fails on one of the ranks, all raise."""
        found: list[_Result] = []
        self.agree(0, attempt(lambda: found.append(work())))
        return found[0]

    def _gather(self, own: int) -> list[int]:
        if self._size == 1:
            return [own]
        said = torch.tensor([own], device=collective_device())
        found = [torch.empty_like(said) for _ in range(self._size)]
        dist.all_gather(found, said, group=self._group)
        return [int(each) for each in found]


def attempt(work: Callable[[], Any]) -> Exception | None:
    """Return the error of some work, which is raised once the other ranks know of it."""
    try:
        work()
    except Exception as error:  # a sampler, or what reads prompts, may raise anything
        return error
    return None
