# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""What a run will have read, window by window, without reading it.

Either the plan itself is made, which is exact, or the shares of the schedules are summed up, which
takes as long for a million steps as for a thousand.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from dataclasses import dataclass
from typing import Any, Iterable, Sequence

import numpy as np

from energon_ext.errors import ConfigError
from energon_ext.mixture.mixture import Mixture
from energon_ext.mixture.tree import BLEND
from energon_ext.plan.dataset import PlannedDataset
from energon_ext.plan.deal import Topology, balanced
from energon_ext.plan.row_source import RowSource
from energon_ext.plan.rows import PlannedRows
from energon_ext.plan.source import Blend, Source

#: Parts of a run of which each has its own figures.
WINDOWS = 240

#: Rows of which the fill of all is estimated, and the fuller ones that a packer begins with.
_TRIED_ROWS, _FIRST_ROWS = 256, 256


@dataclass(frozen=True)
class Forecast:
    """What a run reads.

    Attributes:
        keys: of the sources.
        titles: what people call them.
        ends: steps before the end of each window, int64 [windows].
        shares: of the weights at the first step of each window, 0 of what has ended before it;
            float64 [windows, sources].
        tokens, documents: read in each window, float64 [windows, sources].
        epoch_documents, epoch_tokens: in one epoch of each source, float64 [sources]; tokens are
            NaN where they are not known.
        exhausted: key -> the first step that lacks the source, as its last epoch has ended.
        breakpoints: the first step at or behind each breakpoint of the run.
        positions: of all rows, with and without a token.
        is_exact: whether the plan was made.
        spread: two standard deviations of the share of each source in all rows; 0 where exact.
    """

    keys: tuple[str, ...]
    titles: tuple[str, ...]
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

    @property
    def steps(self) -> int:
        """Steps that the run has; fewer than were asked for where all sources end before."""
        return int(self.ends[-1])

    @property
    def epochs(self) -> np.ndarray:
        """Epochs of each source at the end of each window, float64 [windows, sources].

        By tokens, of which documents that have not ended have some; by documents where tokens are
        not known.
        """
        by_documents = self.documents.cumsum(0) / np.maximum(self.epoch_documents, 1)
        by_tokens = self.tokens.cumsum(0) / np.maximum(self.epoch_tokens, 1)
        return np.where(np.isnan(self.epoch_tokens), by_documents, by_tokens)

    def to_json(self) -> dict[str, Any]:
        return {
            "exact": self.is_exact,
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


def _forecast(
    blend: Blend,
    begins: Sequence[int],
    ends: np.ndarray,
    exhausted: dict[str, int],
    **figures: Any,
) -> Forecast:
    """A forecast of windows that begin and end with some steps."""
    mixture, shares = Mixture(blend.tree, blend.keys, seed=""), []
    ended_at = np.array([exhausted.get(key, math.inf) for key in blend.keys])
    for step in begins:
        mixture.ended[:] = ended_at <= step
        shares.append(mixture.shares(blend.position(step)))
    points = _breakpoint_steps(blend, int(ends[-1]))
    return Forecast(
        keys=blend.keys,
        titles=tuple(blend.names.get(key, key) for key in blend.keys),
        ends=ends,
        shares=np.array(shares),
        exhausted=exhausted,
        breakpoints=tuple(sorted({point for point in points if 0 < point < ends[-1]})),
        epoch_documents=np.array([source.documents for source in blend.sources.values()]),
        epoch_tokens=np.array([blend.epoch_tokens.get(key, np.nan) for key in blend.keys]),
        **figures,
    )


def planned(blend: PlannedDataset, steps: int, progress: Any = iter) -> Forecast:
    """By making the plan of some steps.

    Args:
        blend: the dataset.
        progress: is handed the steps, and hands them on.
    """
    edges = _edges(steps, _breakpoint_steps(blend, steps))
    drawn = blend.planned_steps()
    plan = blend.plan
    ends, counts, done = [0], [(plan.tokens.copy(), plan.documents.copy())], 0
    lasts = np.zeros(len(blend.keys), np.int64)  # steps up to the last one with a token of each
    before = plan.tokens.copy()
    for done, _ in enumerate(progress(itertools.islice(drawn, steps)), 1):
        lasts[plan.tokens != before] = done
        before[:] = plan.tokens
        if done == edges[len(ends)]:
            ends.append(done)
            counts.append((plan.tokens.copy(), plan.documents.copy()))
    if done > ends[-1]:  # all sources have ended inside a window
        ends.append(done)
        counts.append((plan.tokens, plan.documents))
    read = np.diff(np.array(counts, np.float64), axis=0)
    return _forecast(
        blend,
        ends[:-1],
        ends=np.array(ends[1:]),
        tokens=read[:, 0],
        documents=read[:, 1],
        exhausted={
            key: last
            for key, rows, last in zip(blend.keys, blend.rows, lasts.tolist())
            if rows.is_finite and rows.ended
        },
        positions=done * blend.topology.rows_per_step * blend.clock.row_tokens,
        is_exact=True,
        spread=np.zeros(len(blend.keys)),
    )


def estimated(blend: Blend, steps: int, tokens_per_document: float | None = None) -> Forecast:
    """By summing up the shares of the weights.

    A source of a blend is read more or less often than its share says by chance, which ``spread``
    tells.

    Args:
        tokens_per_document: of streamed sources, which do not know.

    Raises:
        ConfigError: a streamed source, and no ``tokens_per_document``.
    """
    mixture = Mixture(blend.tree, blend.keys, seed="")
    sources = list(blend.sources.values())
    row_tokens = blend.clock.row_tokens
    contents = [_row_contents(each, row_tokens, tokens_per_document) for each in sources]
    tokens_per_row, documents_per_row = np.array(contents).T
    limits = np.array([(each.max_epochs or np.inf) * max(each.documents, 1) for each in sources])
    left = limits / documents_per_row  # rows
    rows_per_step = blend.topology.rows_per_step
    rows, begins, ends, variance = [], [], [], np.zeros(len(left))
    exhausted: dict[str, int] = {}
    for begin, end in itertools.pairwise(_edges(steps, _breakpoint_steps(blend, steps))):
        position = blend.position((begin + end) // 2)
        missing, drawn = float(end - begin), np.zeros(len(left))
        while missing > 0 and (share := mixture.shares(position)).any():
            rate = share * rows_per_step
            lasts = np.divide(left, rate, out=np.full(len(left), np.inf), where=rate > 0)
            part = min(missing, float(lasts.min()))
            drawn += part * rate
            left -= part * rate
            variance += part * rows_per_step * share * (1 - share)
            missing -= part
            if part == lasts.min():
                number = int(lasts.argmin())
                mixture.ended[number] = True
                exhausted[blend.keys[number]] = math.ceil(end - missing)
        if drawn.any():
            rows.append(drawn)
            begins.append(begin)
            ends.append(math.ceil(end - missing))
        if missing > 0:
            break
    by_window = np.array(rows)
    total = by_window.sum()
    is_random = any(node.rule == BLEND for node in blend.tree.nodes())
    # An interleave stays within a row or so of its share.
    deviation = np.sqrt(variance) if is_random else np.minimum(1.3, variance)
    return _forecast(
        blend,
        begins,
        ends=np.array(ends),
        tokens=by_window * tokens_per_row,
        documents=by_window * documents_per_row,
        exhausted=exhausted,
        positions=int(total * row_tokens),
        is_exact=False,
        spread=2 * deviation / total,
    )


def imbalance(steps: Iterable[np.ndarray], topology: Topology) -> dict[str, tuple[float, float]]:
    """How much longer the busiest takes than the mean, on average over steps.

    Args:
        steps: costs of the rows of each, float64 [rows per step].
        topology: who reads them.

    Returns:
        ``natural`` and ``dealt``, each (ranks, micro-batches of a round): heaviest over mean.
    """
    orders: dict[str, list[tuple[float, float]]] = {"natural": [], "dealt": []}
    for costs in steps:
        for name, order in (("natural", slice(None)), ("dealt", balanced(costs, topology))):
            grid = costs[order].reshape(topology.rounds, topology.ranks, -1).sum(2)
            ranks, heaviest = grid.sum(0), grid.max(1) / np.maximum(grid.mean(1), 1e-30)
            orders[name].append((float(ranks.max() / ranks.mean()), float(heaviest.mean())))
    means = {name: np.mean(found, axis=0).tolist() for name, found in orders.items()}
    return {name: (ranks, rounds) for name, (ranks, rounds) in means.items()}


def late_breakpoints(blend: Blend, steps: int) -> list[int]:
    """Breakpoints on the schedule axis that a run of some steps does not reach."""
    end = blend.position(steps)
    return sorted(point for point in blend.tree.breakpoints() if point >= end)


def _edges(steps: int, further: Iterable[int]) -> list[int]:
    even = np.linspace(0, steps, min(steps, WINDOWS) + 1).astype(int).tolist()
    return sorted({*even, *(step for step in further if 0 < step < steps)})


def _breakpoint_steps(blend: Blend, steps: int) -> list[int]:
    """The first step at or behind each breakpoint."""
    points = blend.tree.breakpoints()
    return [bisect_left(range(steps), point, key=blend.position) for point in points]


def _row_contents(
    source: Source, row_tokens: int, tokens_per_document: float | None
) -> tuple[float, float]:
    """Tokens and documents of a row; of planned sources as the first rows have them."""
    rows = source.rows
    if not isinstance(rows, RowSource):
        if tokens_per_document is None or not tokens_per_document >= 1:
            raise ConfigError(
                f"{source.key}: is streamed, so its lengths are not known; give --tokens-per-doc."
            )
        tokens = float(row_tokens or tokens_per_document)
        return tokens, tokens / tokens_per_document
    rows.restart()
    first, later = rows.take(_FIRST_ROWS), rows.take(_TRIED_ROWS)
    rows.restart()
    tried = later if len(later) else first
    tokens = tried.num_tokens / len(tried)
    if isinstance(rows, PlannedRows):
        return tokens, tokens / (rows.documents.num_tokens / len(rows.documents))
    return tokens, max(tried.num_documents / len(tried), 1e-12)
