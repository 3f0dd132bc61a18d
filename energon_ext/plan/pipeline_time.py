# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The time of a step over pipeline stages whose ranks share some micro-batches."""

from __future__ import annotations

import functools

import numpy as np

#: Parts of a micro-batch's time: its backward pass takes twice as long as its forward pass.
FORWARD, BACKWARD = 1, 2

#: A pass on a stage: ``(stage, number of the micro-batch, whether it is backward)``.
Pass = tuple[int, int, bool]


def time_of_pipelines(times: np.ndarray, sizes: np.ndarray, stages: int) -> int:
    """Return when the last stage of all pipelines ends, in thirds of a stage's part of a time.

    Every rank of data and context parallelism is a pipeline. Its stages run one forward and one
    backward pass in turns (1F1B; Narayanan et al., 2021), each as soon as its input is there and
    all ranks of the micro-batch's block are ready. With one stage nobody waits; with more the
    ranks of a block may wait where sizes change, since the backward pass of a large block follows
    forward passes of smaller ones, which differ between ranks.

    Args:
        times: int64 [ranks, micro-batches], the time of each micro-batch over all stages.
        sizes: int64 [ranks, micro-batches], ranks of the block that runs it.
        stages: P. The time of the step is the result divided by 3 P.

    Example:
        >>> times, sizes = np.array([[3, 3], [3, 3]]), np.array([[2, 1], [2, 1]])
        >>> time_of_pipelines(times, sizes, stages=1), time_of_pipelines(times, sizes, stages=2)
        (18, 27)
    """
    ranks, count = times.shape
    number = np.arange(ranks)
    starts = [np.flatnonzero(number % sizes[:, n] == 0) for n in range(count)]
    blocks = [sizes[start, n] for n, start in enumerate(starts)]
    free = np.zeros((stages, ranks), np.int64)
    ends: dict[Pass, np.ndarray] = {}
    for each in _order_of_passes(stages, count):
        stage, n, is_backward = each
        ready = free[stage]
        before = (stage + 1 if is_backward else stage - 1, n, is_backward)
        if before in ends:
            ready = np.maximum(ready, ends.pop(before))
        if len(starts[n]) < ranks:
            ready = np.repeat(np.maximum.reduceat(ready, starts[n]), blocks[n])
        end = ready + times[:, n] * (BACKWARD if is_backward else FORWARD)
        free[stage] = end
        ends[each] = end
    return int(free.max())


@functools.lru_cache(maxsize=64)
def _order_of_passes(stages: int, count: int) -> tuple[Pass, ...]:
    """Return all passes, each after those that it needs."""
    waiting = [_passes_of_stage(stage, stages, count) for stage in range(stages)]
    ordered: list[Pass] = []
    done: set[Pass] = set()
    while any(waiting):
        for stage, passes in enumerate(waiting):
            while passes:
                _, n, is_backward = passes[0]
                before = (stage + 1 if is_backward else stage - 1, n, is_backward)
                if 0 <= before[0] < stages and before not in done:
                    break
                ordered.append(passes.pop(0))
                done.add(ordered[-1])
    return tuple(ordered)


def _passes_of_stage(stage: int, stages: int, count: int) -> list[Pass]:
    """Return the passes of a stage in order: some forward ones first, then in turns."""
    first = min(stages - stage - 1, count)
    passes = [(stage, n, False) for n in range(first)]
    for n in range(count - first):
        passes += [(stage, first + n, False), (stage, n, True)]
    return passes + [(stage, n, True) for n in range(count - first, count)]
