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
from typing import Any, Iterable

import numpy as np

from energon_ext.errors import ConfigError
from energon_ext.mixture.mixture import Mixture
from energon_ext.mixture.tree import BLEND
from energon_ext.plan.dataset import PlannedDataset
from energon_ext.plan.deal import Topology, balanced
from energon_ext.plan.row_source import RowSource
from energon_ext.plan.source import Blend, Source

#: Parts of a run of which each has its own figures.
WINDOWS = 240

#: Rows of which the fill of all is estimated, the fuller ones that a packer begins with, and
#: sources that are asked for some.
_TRIED_ROWS, _FIRST_ROWS, _TRIED_SOURCES = 256, 256, 8


@dataclass(frozen=True)
class Forecast:
    """What a run reads.

    Attributes:
        keys: of the sources.
        titles: what people call them.
        ends: steps before the end of each window, int64 [windows].
        shares: of the weights at the first step of each window, float64 [windows, sources].
        tokens, documents: read in each window, float64 [windows, sources].
        epoch_documents: documents in one epoch of each source, int64 [sources].
        exhausted: key -> the first step that lacks the source, as its last epoch has ended.
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
    exhausted: dict[str, int]
    positions: int
    is_exact: bool
    spread: np.ndarray

    @property
    def steps(self) -> int:
        """Steps that the run has; fewer than were asked for where all sources end before."""
        return int(self.ends[-1])

    @property
    def epochs(self) -> np.ndarray:
        """Epochs of each source at the end of each window, float64 [windows, sources]."""
        return self.documents.cumsum(0) / np.maximum(self.epoch_documents, 1)

    def to_json(self) -> dict[str, Any]:
        """All of it."""
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
                    "ends_at_step": self.exhausted.get(key),
                    "spread": float(self.spread[number]),
                }
                for number, key in enumerate(self.keys)
            },
        }


def planned(blend: PlannedDataset, steps: int, progress: Any = iter) -> Forecast:
    """By making the plan of some steps.

    Args:
        blend: with a shared plan.
        progress: is handed the steps, and hands them on.
    """
    edges = _edges(steps, [])
    drawn = blend.planned_steps()
    plan = blend.plan
    tokens, documents, done = [plan.tokens.copy()], [plan.documents.copy()], 0
    lasts = np.zeros(len(blend.keys), np.int64)  # steps up to the last one with a token of each
    before = plan.tokens.copy()
    for done, _ in enumerate(progress(itertools.islice(drawn, steps)), 1):
        lasts[plan.tokens != before] = done
        before[:] = plan.tokens
        if done == edges[len(tokens)]:
            tokens.append(plan.tokens.copy())
            documents.append(plan.documents.copy())
    ends = edges[1 : len(tokens)]
    if done > edges[len(tokens) - 1]:  # all sources have ended inside a window
        ends = [*ends, done]
        tokens.append(plan.tokens)
        documents.append(plan.documents)
    return Forecast(
        keys=blend.keys,
        titles=tuple(blend.names.get(key, key) for key in blend.keys),
        ends=np.array(ends),
        shares=_shares_at(blend, [0, *ends[:-1]]),
        tokens=np.diff(tokens, axis=0).astype(np.float64),
        documents=np.diff(documents, axis=0).astype(np.float64),
        epoch_documents=np.array([s.documents for s in blend.sources.values()]),
        exhausted={
            key: last
            for (key, source), last in zip(blend.sources.items(), lasts.tolist())
            if source.rows.is_finite and source.rows.ended
        },
        positions=done * blend.topology.rows_per_step * blend.clock.row_tokens,
        is_exact=True,
        spread=np.zeros(len(blend.keys)),
    )


def estimated(blend: Blend, steps: int, tokens_per_document: float | None = None) -> Forecast:
    """By summing up the shares of the weights.

    Rows of all sources are taken as equally full. A source of a blend is read more or less often
    than its share says by chance, which ``spread`` tells.

    Args:
        tokens_per_document: of streamed sources, which do not know.

    Raises:
        ConfigError: a streamed source, and no ``tokens_per_document``.
    """
    mixture = Mixture(blend.tree, blend.keys, seed="")
    tokens_a_row, documents_a_row = _row_contents(blend, tokens_per_document)
    limits = np.array(
        [(s.max_epochs or np.inf) * max(s.documents, 1) for s in blend.sources.values()]
    )
    left = limits / documents_a_row  # rows
    rows_a_step = blend.topology.rows_per_step
    edges = _edges(steps, _breakpoint_steps(blend, steps))
    rows, shares, variance = [], [], np.zeros(len(left))
    exhausted: dict[str, int] = {}
    ends = []
    for begin, end in itertools.pairwise(edges):
        position = blend.position((begin + end) // 2)
        missing, drawn = float(end - begin), np.zeros(len(left))
        while missing > 0 and (share := mixture.shares(position)).any():
            rate = share * rows_a_step
            lasts = np.divide(left, rate, out=np.full(len(left), np.inf), where=rate > 0)
            part = min(missing, float(lasts.min()))
            drawn += part * rate
            left -= part * rate
            variance += part * rows_a_step * share * (1 - share)
            missing -= part
            if part == lasts.min():
                number = int(lasts.argmin())
                mixture.ended[number] = True
                exhausted[blend.keys[number]] = math.ceil(end - missing)
        if drawn.any():
            rows.append(drawn)
            ends.append(math.ceil(end - missing))
            shares.append(begin)
        if missing > 0:
            break
    by_window = np.array(rows)
    total = by_window.sum()
    is_random = any(node.rule == BLEND for node in blend.tree.nodes())
    # An interleave stays within a row or so of its share.
    deviation = np.sqrt(variance) if is_random else np.minimum(1.3, variance)
    return Forecast(
        keys=blend.keys,
        titles=tuple(blend.names.get(key, key) for key in blend.keys),
        ends=np.array(ends),
        shares=_shares_at(blend, shares),
        tokens=by_window * tokens_a_row,
        documents=by_window * documents_a_row,
        epoch_documents=np.array([s.documents for s in blend.sources.values()]),
        exhausted=exhausted,
        positions=int(total * blend.clock.row_tokens),
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


def _shares_at(blend: Blend, steps: Iterable[int]) -> np.ndarray:
    mixture = Mixture(blend.tree, blend.keys, seed="")
    return np.array([mixture.shares(blend.position(step)) for step in steps])


def _row_contents(blend: Blend, tokens_per_document: float | None) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and documents of a row of each source, float64 [sources] both."""
    sources = list(blend.sources.values())
    planned_ones = [source for source in sources if isinstance(source.rows, RowSource)]
    tried = planned_ones[:: -(-len(sources) // _TRIED_SOURCES)]
    contents = {source.key: _tried(source) for source in tried}
    seq_len = blend.clock.row_tokens
    usual = float(seq_len)
    if contents and seq_len:
        usual = float(np.mean([tokens for tokens, _ in contents.values()]))
    for source in sources:
        rows: Any = source.rows
        if not isinstance(rows, RowSource):
            if tokens_per_document is None or not tokens_per_document >= 1:
                raise ConfigError(
                    f"{source.key}: is streamed, so its lengths are not known; give "
                    f"--tokens-per-doc."
                )
            found = usual or tokens_per_document
            contents[source.key] = found, found / tokens_per_document
        elif hasattr(rows, "documents"):
            tokens = contents.get(source.key, (usual, 0))[0]
            mean = rows.documents.num_tokens / max(1, len(rows.documents))
            contents[source.key] = tokens, tokens / mean
        elif source.key not in contents:
            contents[source.key] = _tried(source)
    table = np.array([contents[source.key] for source in sources])
    return table[:, 0], np.maximum(table[:, 1], 1e-12)


def _tried(source: Source) -> tuple[float, float]:
    """Tokens and documents of a row, as the first ones of a source have them."""
    source.rows.restart()
    first, later = source.rows.take(_FIRST_ROWS), source.rows.take(_TRIED_ROWS)
    source.rows.restart()
    taken = later if len(later) else first
    return taken.num_tokens / len(taken), taken.num_documents / len(taken)
