# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Share micro-batches between the virtual pipeline stages of a process.

All stages need the same micro-batches in the same order, at different times. The first stage to
need one draws it, sends it to the other tensor-parallel ranks and copies it to the device; it is
kept until every stage has taken it. Tensor-parallel ranks run their stages in the same order, so
they agree without a message on who gets it first.
"""

from collections import deque
from typing import Callable, Iterator, TypeVar

import torch
from megatron.core import parallel_state

from energon_ext.batch.packed_batch import PackedBatch
from energon_ext.errors import ConfigError
from energon_ext.megatron.rank_data import rank_data

B = TypeVar("B", bound=PackedBatch)


def take_for_stage(
    vp_stage: int | None,
    data_iterator: Iterator[B] | None,
    get: Callable[[], tuple[B | None, B]],
) -> B:
    """Return the next micro-batch of a virtual stage.

    Args:
        vp_stage: number of the stage; None gets a micro-batch of its own.
        data_iterator: the stage's own, which repeats what another stage has drawn; None on ranks
            that do not draw.
        get: draws, sends and copies the next micro-batch; returns it as drawn and as copied.

    Raises:
        ConfigError: the iterators of two stages give different batches.
    """
    stages = parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1
    if vp_stage is None or stages == 1:
        return get()[1]
    data = rank_data()
    if len(data.waiting) != stages:
        data.waiting = [deque() for _ in range(stages)]
    own = data.waiting[vp_stage]
    if not own:
        try:
            found = get()
        except BaseException:
            data.waiting.clear()  # the other stages will not take theirs
            raise
        for stage in data.waiting:
            stage.append(found)
    elif data_iterator is not None:
        _check_equal(next(data_iterator), own[0][0], vp_stage)
    batch: B = own.popleft()[1]
    return batch


def _check_equal(drawn: PackedBatch, earlier: PackedBatch | None, vp_stage: int) -> None:
    if drawn is earlier or (earlier and torch.equal(drawn.tokens, earlier.tokens)):
        return
    raise ConfigError(
        f"Virtual pipeline stage {vp_stage} drew a batch that differs from that of an earlier "
        f"stage; give all stages of a process the same batches, for example with itertools.tee, "
        f"and call create_broadcast_groups() before you begin again after a step that failed."
    )
