# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Forecast what a run will read, window by window, by drawing its plan without reading any tokens.

:mod:`energon_ext.plan.estimate` forecasts longer runs without drawing the plan.
"""

from __future__ import annotations

import functools
import itertools
import math
from bisect import bisect_left
from dataclasses import dataclass
from typing import Any, Mapping, Sequence

import numpy as np

from energon_ext.errors import ConfigError
from energon_ext.mixture.mixture import Mixture
from energon_ext.plan.blend import Blend
from energon_ext.plan.cursor import fork_at
from energon_ext.plan.plan import PlanState
from energon_ext.plan.run import Run
from energon_ext.plan.source import PlannedSource

#: Number of parts of a run that are reported separately.
WINDOWS = 240


@dataclass(frozen=True)
class Forecast:
    """The sources of a run over time.

    Attributes:
        keys: keys of the sources.
        titles: names of the sources for people.
        first: the first step, > 0 after a saved state.
        before: tokens and documents of each source before ``first``, int64 [2, sources].
        ends: the step after the last one of each window, int64 [windows].
        shares: share of each source at the first step of each window, 0 if the source has ended;
            float64 [windows, sources].
        tokens, documents: amounts read in each window, float64 [windows, sources].
        epoch_documents, epoch_tokens: size of an epoch, float64 [sources]; tokens may be NaN.
        exhausted: key -> the first step without the source, after its last epoch.
        breakpoints: the first step at or after each breakpoint within the forecast.
        positions: positions of all rows, including padding.
        is_exact: whether the plan was drawn.
        spread: two standard deviations of the share of each source in all rows; 0 if exact.
        counted: epochs of each source before ``first`` and at the end of each window, NaN if all
            its epochs are of the same size; float64 [windows + 1, sources].
    """

    keys: tuple[str, ...]
    titles: tuple[str, ...]
    first: int
    before: np.ndarray
    ends: np.ndarray
    shares: np.ndarray
    tokens: np.ndarray
    documents: np.ndarray
    epoch_documents: np.ndarray
    epoch_tokens: np.ndarray
    exhausted: dict[str, int]
    breakpoints: tuple[int, ...]
    positions: int
    is_exact: bool
    spread: np.ndarray
    counted: np.ndarray

    @property
    def steps(self) -> int:
        """Number of steps; fewer than requested if all sources end earlier."""
        return int(self.ends[-1]) - self.first

    @property
    def epochs(self) -> np.ndarray:
        """Epochs of each source at the end of each window, float64 [windows, sources].

        Counted in tokens, which include documents read in part; in documents if tokens are unknown.
        """
        tokens, documents = self.before
        tokens, documents = tokens + self.tokens.cumsum(0), documents + self.documents.cumsum(0)
        return self._epochs(tokens, documents, self.counted[1:])

    @property
    def epochs_before(self) -> np.ndarray:
        """Epochs of each source before the first step, float64 [sources]."""
        tokens, documents = self.before
        return self._epochs(tokens, documents, self.counted[0])

    def _epochs(self, tokens: np.ndarray, documents: np.ndarray, counted: np.ndarray) -> np.ndarray:
        by_documents = documents / np.maximum(self.epoch_documents, 1)
        by_tokens = tokens / np.maximum(self.epoch_tokens, 1)
        read = np.where(np.isnan(self.epoch_tokens), by_documents, by_tokens)
        return np.where(np.isnan(counted), read, counted)

    def to_json(self) -> dict[str, Any]:
        return {
            "exact": self.is_exact,
            "first_step": self.first,
            "steps": self.steps,
            "positions": self.positions,
            "window_ends": self.ends.tolist(),
            "sources": {
                key: {
                    "share": self.shares[:, number].tolist(),
                    "tokens": self.tokens[:, number].tolist(),
                    "documents": self.documents[:, number].tolist(),
                    "epoch_documents": int(self.epoch_documents[number]),
                    "epochs": float(self.epochs[-1, number]),
                    "ends_at_step": self.exhausted.get(key),
                    "spread": float(self.spread[number]),
                }
                for number, key in enumerate(self.keys)
            },
        }


def forecast_of(
    blend: Blend, edges: Sequence[int], exhausted: dict[str, int], **figures: Any
) -> Forecast:
    """Build a forecast from the edges and the figures of its windows."""
    mixture, shares = Mixture(blend.tree, blend.keys), []
    ended_at = np.array([exhausted.get(key, math.inf) for key in blend.keys])
    for step in edges[:-1]:
        mixture.ended[:] = ended_at <= step
        shares.append(mixture.shares(position_of(blend, step)))
    start, names, epoch_tokens = start_of(blend), blend.names, blend.epoch_tokens
    return Forecast(
        keys=blend.keys,
        titles=tuple(names.get(key, key) for key in blend.keys),
        first=start.step,
        before=np.array([start.tokens, start.documents]),
        ends=np.array(edges[1:]),
        shares=np.array(shares),
        exhausted=exhausted,
        breakpoints=tuple(sorted(_breakpoint_steps(blend, edges[-1] - start.step))),
        epoch_documents=np.array([source.documents for source in blend.sources.values()]),
        epoch_tokens=np.array([epoch_tokens.get(key, np.nan) for key in blend.keys]),
        **figures,
    )


def check_not_empty(edges: Sequence[int]) -> None:
    """Raise ConfigError if there is no window between the edges."""
    if len(edges) < 2:
        raise ConfigError("No row is left: all sources have ended; raise a max_epochs.")


def start_of(blend: Blend) -> PlanState:
    """Return the state of the plan at the current position of a dataset."""
    if isinstance(blend, Run):
        return blend.progress.plan
    nothing = np.zeros(len(blend.keys), np.int64)
    return PlanState(0, 0, (), 0, nothing, nothing, nothing, (), nothing, {})


def epochs_counted(blend: Blend) -> np.ndarray:
    """Return the epochs that the orders of the sources have counted; NaN if that needs no order."""
    if not isinstance(blend, Run):
        return np.full(len(blend.keys), np.nan)
    counts = [rows.epoch_count for rows in blend.rows]
    return np.array([np.nan if each is None else each.after(0, 1) for each in counts], np.float64)


def epochs_at(forecast: Forecast, blend: Blend, tokens: int) -> np.ndarray:
    """Return how often each source would be read in a run of this many tokens, float64 [sources].

    The run has the shares of the forecast, reads all documents of its sources, and has no limits.
    NaN for a source whose documents are not read whole, or are not known.
    """
    whole = [
        source.first_rows.source_tokens if isinstance(source, PlannedSource) else None
        for source in blend.sources.values()
    ]
    scale = tokens / max(forecast.positions, 1)
    return forecast.tokens.sum(0) * scale / np.array(whole, np.float64)


def position_of(blend: Blend, step: int) -> int:
    """Return the position of a step of the plan on the schedule axis."""
    start = start_of(blend)
    row = start.row + (step - start.step) * blend.topology.rows_per_step
    return blend.clock.at(step, row, start.row_lengths)


def forecast(
    blend: Run, steps: int, progress: Any = iter, state: Mapping[str, Any] | None = None
) -> Forecast:
    """Forecast exactly, by drawing the plan; the dataset itself does not move.

    Args:
        progress: wraps the iterator of steps, to show progress.
        state: cursor to start from, as a loader or a dataset gives it; None for the current
            position of the dataset.

    Raises:
        ConfigError: no row is left.
    """
    blend = blend.fork() if state is None else fork_at(blend, state)
    drawn, plan, first = blend.draw_steps(), blend.plan, start_of(blend).step
    planned_edges = window_edges(blend, steps)
    edges, counts, done = [first], [(plan.tokens.copy(), plan.documents.copy())], first
    counted = [epochs_counted(blend)]
    lasts = np.full(len(blend.keys), first)  # the step after the last one with tokens of a source
    before = plan.tokens.copy()
    for done, _ in enumerate(progress(itertools.islice(drawn, steps)), first + 1):
        lasts[plan.tokens != before] = done
        before[:] = plan.tokens
        if done == planned_edges[len(edges)]:
            edges.append(done)
            counts.append((plan.tokens.copy(), plan.documents.copy()))
            counted.append(epochs_counted(blend))
    if done > edges[-1]:  # all sources ended inside a window
        edges.append(done)
        counts.append((plan.tokens, plan.documents))
        counted.append(epochs_counted(blend))
    check_not_empty(edges)
    read = np.diff(np.array(counts, np.float64), axis=0)
    return forecast_of(
        blend,
        edges,
        tokens=read[:, 0],
        documents=read[:, 1],
        exhausted={
            key: last
            for key, rows, last in zip(blend.keys, blend.rows, lasts.tolist())
            if rows.is_finite and rows.ended
        },
        positions=(done - first) * blend.topology.rows_per_step * blend.clock.row_tokens,
        is_exact=True,
        spread=np.zeros(len(blend.keys)),
        counted=np.array(counted),
    )


def late_breakpoints(blend: Blend, end_step: int) -> list[int]:
    """Return the breakpoints that a run of ``end_step`` steps does not reach."""
    end = position_of(blend, end_step)
    weights = (weight for node in blend.tree.nodes() for weight in node.weights)
    late = {point for weight in weights for point in weight.unreached(end)}
    rows = blend.clock.rows
    return sorted(late if rows is None else late.union(rows.unreached(end)))


def window_edges(blend: Blend, steps: int) -> list[int]:
    """Return the steps at which windows begin and end: evenly spaced ones, and breakpoints."""
    even = start_of(blend).step + np.linspace(0, steps, min(steps, WINDOWS) + 1).astype(int)
    return sorted({*even.tolist(), *_breakpoint_steps(blend, steps)})


def _breakpoint_steps(blend: Blend, steps: int) -> set[int]:
    """Return the first step at or after each breakpoint, of those within the next ``steps``."""
    rows, first = blend.clock.rows, start_of(blend).step
    points = {*blend.tree.breakpoints(), *(() if rows is None else rows.breakpoints)}
    all_steps, position = range(first, first + steps), functools.partial(position_of, blend)
    reached = {first + bisect_left(all_steps, point, key=position) for point in points}
    return reached - {first, first + steps}
