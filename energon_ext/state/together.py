# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Work that fails on all ranks where it fails on one."""

from __future__ import annotations

from typing import Any, Callable, TypeVar

import torch
import torch.distributed as dist

from energon_ext.errors import EnergonExtError

T = TypeVar("T")


def on_all_ranks(work: Callable[[], T], group: Any = None) -> list[T]:
    """Do something on every rank of a group; if it fails on one, all raise.

    A rank that failed alone would leave the others in their next collective for ever.

    Args:
        work: what this rank does; its result is pickled.
        group: of torch.distributed, the default one where it is None; none is needed for one rank.

    Returns:
        The results of all ranks, in their order.

    Raises:
        EnergonExtError: of this rank; or of another one, with its number.
    """
    result, error = None, None
    try:
        result = work()
    except BaseException as caught:  # Ctrl-C as well: the other ranks wait to hear from us
        error = caught
    outcomes: list[Any] = [(result, None if error is None else _portable(error))]
    if dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1:
        outcomes *= dist.get_world_size(group)
        dist.all_gather_object(outcomes, outcomes[0], group=group)
    if error is not None:
        raise error
    for rank, (_, other) in enumerate(outcomes):
        if other is not None:
            raise type(other)(f"On rank {rank}: {other}")
    return [result for result, _ in outcomes]


def collective_device() -> torch.device:
    """Where tensors lie that ranks add up: this process's GPU, where there is one."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _portable(error: BaseException) -> EnergonExtError:
    if isinstance(error, EnergonExtError):
        return error
    first_line = (str(error).splitlines() or [""])[0]
    return EnergonExtError(f"{type(error).__name__}: {first_line}")
