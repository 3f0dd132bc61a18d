# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Steps of a run whose loss stands out from the steps before them."""

from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from energon_ext.cli.metrics import Run

#: Losses before a step whose median is usual, and changes that measure how much losses vary.
USUAL, WINDOW = 8, 32

#: A loss stands out if it exceeds the usual one by this many times the change from step
#: to step, in the median, and by such a share of it at least.
TIMES, SHARE = 6.0, 0.05

#: Sources that are looked at, those of most tokens; and spikes that are named, the highest.
MOST_SOURCES, MOST_SPIKES = 64, 10


@dataclass(frozen=True)
class Spike:
    """An unusually high loss."""

    step: int  # the optimizer step, from 1
    source: str | None  # what people call it, None where it is the loss of all
    loss: float
    usual: float  # the median of the losses before it

    def __str__(self) -> str:
        whose = "the loss" if self.source is None else f"the loss of {self.source}"
        return f"step {self.step}: {whose} is {self.loss:.2f}, where {self.usual:.2f} is usual"


def spikes_of(run: Run) -> list[Spike]:
    """The highest spikes of a run, by height: of all sources together, and of each."""
    found = _spikes(run.loss, run, None)
    for index in np.argsort(-run.tokens.sum(0), kind="stable")[:MOST_SOURCES]:
        found += _spikes(run.source_loss[:, index], run, run.titles[index])
    found.sort(key=lambda spike: spike.usual - spike.loss)
    return found[:MOST_SPIKES]


def _spikes(losses: np.ndarray, run: Run, source: str | None) -> list[Spike]:
    known = np.flatnonzero(np.isfinite(losses))
    values = losses[known]
    if len(values) <= USUAL:
        return []
    usual = np.median(sliding_window_view(values, USUAL)[:-1], axis=1)
    changes = np.concatenate([np.full(WINDOW, np.nan), np.abs(np.diff(values))])
    variation = np.nanmedian(sliding_window_view(changes, WINDOW)[USUAL - 1 : -1], axis=1)
    later, steps = values[USUAL:], run.step[known[USUAL:]]
    stands_out = later - usual > np.maximum(TIMES * variation, SHARE * np.abs(usual))
    columns = (each[stands_out].tolist() for each in (steps, later, usual))
    return [Spike(step, source, loss, before) for step, loss, before in zip(*columns)]
