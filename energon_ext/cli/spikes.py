# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Loss spikes: steps of a run whose loss is well above that of the steps before."""

from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from energon_ext.metrics.file import Run

#: The usual loss is the median of this many losses before a step; variation is the median of
#: this many changes from step to step.
USUAL, WINDOW = 8, 32

#: A loss is a spike if it exceeds the usual loss by this many times the variation, and by at
#: least this share of the usual loss.
TIMES, SHARE = 6.0, 0.05

#: The sources with the most tokens are searched, and the highest spikes are reported.
MAX_SOURCES, MAX_SPIKES = 64, 10


@dataclass(frozen=True)
class Spike:
    """An unusually high loss."""

    step: int  # the optimizer step, from 1
    source: str | None  # its display name; None for the total loss
    loss: float
    usual: float  # the median of the losses before it

    def __str__(self) -> str:
        subject = "the loss" if self.source is None else f"the loss of {self.source}"
        return f"step {self.step}: {subject} is {self.loss:.2f}, usually {self.usual:.2f}"


def spikes_of(run: Run) -> list[Spike]:
    """Return the highest spikes of the total loss and of each source, highest first."""
    spikes = _spikes(run.loss, run, None)
    for index in np.argsort(-run.tokens.sum(0), kind="stable")[:MAX_SOURCES]:
        spikes += _spikes(run.source_loss[:, index], run, run.titles[index])
    spikes.sort(key=lambda spike: spike.usual - spike.loss)
    return spikes[:MAX_SPIKES]


def _spikes(losses: np.ndarray, run: Run, source: str | None) -> list[Spike]:
    known = np.flatnonzero(np.isfinite(losses))
    values = losses[known]
    if len(values) <= USUAL:
        return []
    usual = np.median(sliding_window_view(values, USUAL)[:-1], axis=1)
    changes = np.concatenate([np.full(WINDOW, np.nan), np.abs(np.diff(values))])
    variation = np.nanmedian(sliding_window_view(changes, WINDOW)[USUAL - 1 : -1], axis=1)
    later, steps = values[USUAL:], run.step[known[USUAL:]]
    is_spike = later - usual > np.maximum(TIMES * variation, SHARE * np.abs(usual))
    columns = (values[is_spike].tolist() for values in (steps, later, usual))
    return [Spike(step, source, loss, before) for step, loss, before in zip(*columns)]
