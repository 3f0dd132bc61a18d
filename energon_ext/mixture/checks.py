# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""What is wrong, or looks wrong, with a blend before the run starts.

The weights are known for all time, so a gap at batch 40 000 is found at batch 0. What cannot work
is an error; what works, but is rarely meant, is a :class:`BlendWarning`.
"""

from __future__ import annotations

import dataclasses
import re
import warnings
from typing import Iterable, Sequence

from megatron.energon import WorkerConfig

from energon_ext.errors import ConfigError
from energon_ext.mixture.choice import Source
from energon_ext.weights import ScheduleAxis, WeightSpec

#: A constant whose share falls below this because of a schedule was probably written on another
#: scale than the schedule.
DROWNED_SHARE = 1e-3


class BlendWarning(UserWarning):
    """A blend that works and is probably not what was meant."""


def check_blend(sources: Sequence[Source], axis: ScheduleAxis, worker_config: WorkerConfig) -> None:
    """Refuse a blend that some worker cannot draw from, and warn of one that looks wrong.

    Args:
        sources: of one blend.
        axis: what the knots in the YAML count, and where the run ends.
        worker_config: Energon's; each rank looks at its own workers.

    Raises:
        ConfigError: all weights are 0 somewhere; names the batch index, the worker, the weights.
    """
    sources = [
        dataclasses.replace(source, weight=axis.restate(source.weight)) for source in sources
    ]
    check_never_all_zero(sources, worker_config)
    for message in questionable(sources, axis):
        warnings.warn(message, BlendWarning, stacklevel=2)


def check_never_all_zero(sources: Sequence[Source], worker_config: WorkerConfig) -> None:
    """Find an index at which a worker of this rank would have nothing to draw."""
    for worker in range(max(1, worker_config.num_workers)):
        present = [source for source in sources if source.dataset.len_worker(worker) > 0]
        for batch_index in _decisive_indices(source.weight for source in present):
            if not any(source.weight.evaluate(batch_index) > 0 for source in present):
                weights = {source.key: repr(source.weight) for source in present}
                raise ConfigError(
                    f"Every weight is 0 at batch index {batch_index} for worker {worker} of rank "
                    f"{worker_config.rank}, which has samples of {weights}. Give one of them a "
                    f"weight > 0 there; use fewer workers if a source is so small that it has no "
                    f"sample for this one."
                )


def questionable(sources: Sequence[Source], axis: ScheduleAxis) -> list[str]:
    """One sentence for each thing that works and is probably not meant."""
    return [
        *_never_reached(sources, axis),
        *_drowned(sources),
        *_listed_twice(sources),
        *_nothing_after_caps(sources),
    ]


def _never_reached(sources: Sequence[Source], axis: ScheduleAxis) -> Iterable[str]:
    if axis.end is None:
        return
    end = axis.first_batch_at(axis.end)
    for source in sources:
        late = [knot for knot in source.weight.knots() if knot >= end]
        if source.weight.is_scheduled and late:
            yield (
                f"{source.key}: the schedule {source.weight.describe()} goes on to batch index "
                f"{late[-1]}, but the run ends at {end} ({axis.end} {axis.unit})."
            )


def _drowned(sources: Sequence[Source]) -> Iterable[str]:
    drowned: dict[str, tuple[float, int]] = {}
    for batch_index in _decisive_indices(source.weight for source in sources):
        weights = [source.weight.evaluate(batch_index) for source in sources]
        total = sum(weights)
        for source, weight in zip(sources, weights):
            if not source.weight.is_scheduled and 0 < weight < DROWNED_SHARE * total:
                smallest = drowned.get(source.key, (1.0, 0))
                drowned[source.key] = min(smallest, (weight / total, batch_index))
    if any(source.weight.is_scheduled for source in sources):
        for key, (share, batch_index) in drowned.items():
            yield (
                f"{key}: a constant weight that is {share:.1e} of the blend at batch index "
                f"{batch_index}; is it on the same scale as the schedules beside it?"
            )


def _listed_twice(sources: Sequence[Source]) -> Iterable[str]:
    for source in sources:
        if re.search(r"#\d+$", source.key):
            yield (
                f"{source.key}: the same source is listed more than once; each reads all of it, in "
                f"an order of its own."
            )


def _nothing_after_caps(sources: Sequence[Source]) -> Iterable[str]:
    """A capped source may leave at any index, so the others must do without it at every index."""
    lasting = [source for source in sources if source.max_epochs is None]
    if not lasting or len(lasting) == len(sources):
        return
    for batch_index in _decisive_indices(source.weight for source in sources):
        if not any(source.weight.evaluate(batch_index) > 0 for source in lasting):
            caps = {s.key: s.max_epochs for s in sources if s.max_epochs is not None}
            yield (
                f"At batch index {batch_index} only sources with a max_epochs have a weight > 0 "
                f"({caps}); should they have left by then, the run ends there with an error. Give "
                f"another source a weight, however small."
            )
            return


def _decisive_indices(weights: Iterable[WeightSpec]) -> list[int]:
    """Between two knots a weight is 0 everywhere or nowhere and monotone, so the knots and the
    indices after them stand for all."""
    knots = {0, *(knot for weight in weights for knot in weight.knots())}
    return sorted(knots | {knot + 1 for knot in knots})
