# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Keeps ranks together: what they say, when work fails, and at the end of a run."""

import datetime
from typing import Any, Callable, Mapping, TypeVar

import torch
import torch.distributed as dist
from megatron.energon import WorkerConfig

from energon_ext.errors import DataExhaustedError, EnergonExtError, first_line

T = TypeVar("T")


def on_all_ranks(work: Callable[[], T], group: Any = None) -> list[T]:
    """Run a function on every rank of a group; if it fails on one rank, all ranks raise.

    If only one rank raised, the others would wait in their next collective forever.

    Args:
        work: the function; its result is pickled.
        group: group of torch.distributed, None for the default; a single rank needs none.

    Returns:
        The results of all ranks, in rank order.

    Raises:
        EnergonExtError: another rank failed, whose number is given; own errors are raised as is.
    """
    result, error = None, None
    try:
        result = work()
    except BaseException as caught:  # including Ctrl-C: the other ranks wait for this one
        error = caught
    outcomes: list[Any] = [(result, None if error is None else _portable(error))]
    if (size := group_size(group)) > 1:
        outcomes *= size
        dist.all_gather_object(outcomes, outcomes[0], group=group)
    if error is not None:
        raise error
    for rank, (_, other) in enumerate(outcomes):
        if other is not None:
            raise type(other)(f"On rank {rank}: {other}")
    return [result for result, _ in outcomes]


def from_first_rank(work: Callable[[], T], group: dist.ProcessGroup) -> T:
    """Run a function on the first rank of a group and return its result on every rank.

    Args:
        work: the function; its result is pickled.

    Raises:
        EnergonExtError: the first rank failed; it raises its own error as it is.
    """
    first = dist.get_process_group_ranks(group)[0]
    outcome: list[Any] = [None]
    error = None
    if dist.get_rank() == first:
        try:
            outcome = [(work(), None)]
        except BaseException as caught:  # including Ctrl-C: the other ranks wait for this one
            error = caught
            outcome = [(None, _portable(caught))]
    if group_size(group) > 1:
        dist.broadcast_object_list(outcome, first, group=group)
    if error is not None:
        raise error
    result, other = outcome[0]
    if other is not None:
        raise type(other)(f"On rank {first}: {other}")
    return result


def create_group_of(own: Any, timeout: datetime.timedelta | None = None) -> dist.ProcessGroup:
    """Create the gloo group of the ranks that give the same value; all ranks call this together.

    torch numbers groups on each process, so groups that only some ranks create would get different
    names and wait for each other.
    """
    found = on_all_ranks(lambda: own)
    groups = [[rank for rank, each in enumerate(found) if each == it] for it in sorted({*found})]
    group, _ = dist.new_subgroups_by_enumeration(groups, timeout=timeout, backend="gloo")
    return group


def end_together(
    has_batch: bool,
    limits: Mapping[str, int],
    batch_index: int,
    worker_config: WorkerConfig,
    *,
    is_planned: bool,
) -> None:
    """Raise DataExhaustedError on every data-parallel rank if one of them has no batch left.

    Ranks that share a plan end at the same batch anyway. Other ranks must call this together: a
    rank that continued alone would wait for the gradients of the others forever.

    Args:
        limits: ``max_epochs`` of each source, for the message.
        batch_index: index of the missing batch.
    """
    has_ended = not has_batch
    group = worker_config.data_parallel_group
    if not is_planned and worker_config.world_size > 1 and group_size(group) > 1:
        anywhere = torch.tensor(int(has_ended), device=collective_device())
        dist.all_reduce(anywhere, dist.ReduceOp.MAX, group=group)
        has_ended = bool(anywhere)
    if not has_ended:
        return
    rank = "another" if has_batch else "this"
    listed = ", ".join(f"{key}: {limit}" for key, limit in limits.items())
    raise DataExhaustedError(
        f"Every source has reached its max_epochs ({listed}): {rank} data-parallel rank has no "
        f"batch {batch_index}. Train for fewer steps, or raise or remove a limit."
    )


def group_size(group: Any = None) -> int:
    """Return the number of ranks of a group, None for the default; 1 without torch.distributed."""
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1


def collective_device() -> torch.device:
    """Return the device for tensors in collectives: the current GPU, if there is one."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _portable(error: BaseException) -> EnergonExtError:
    if isinstance(error, EnergonExtError):
        return error
    reason = first_line(error) if str(error) else ""
    return EnergonExtError(f"{type(error).__name__}: {reason}")
