# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Estimate what a run will read, window by window, from the shares of its schedules.

This takes as long for a million steps as for a thousand.
"""

from __future__ import annotations

import itertools
import math

import numpy as np

from energon_ext.errors import ConfigError
from energon_ext.mixture.mixture import Mixture
from energon_ext.mixture.tree import BLEND
from energon_ext.plan.blend import Blend
from energon_ext.plan.forecast import (
    Forecast,
    check_not_empty,
    epochs_counted,
    forecast_of,
    position_of,
    start_of,
    window_edges,
)
from energon_ext.plan.source import PlannedSource, Source

#: First rows, which a packer fills better than later ones, and rows to sample after them.
_FIRST_ROWS, _SAMPLED_ROWS = 256, 256


#: Mean tokens and documents in a row of each source.
RowContents = list[tuple[float, float]]


def estimate(
    blend: Blend,
    steps: int,
    tokens_per_document: float | None = None,
    contents: RowContents | None = None,
) -> Forecast:
    """Estimate by summing the shares of the sources, from the current position of the dataset.

    ``spread`` measures how far random draws of a blend may deviate from the shares.

    Args:
        tokens_per_document: mean for streamed sources, whose lengths are unknown.
        contents: those of its sources if they are known already, see :func:`row_contents`.

    Raises:
        ConfigError: a source is streamed and ``tokens_per_document`` is missing, or no row is left.
    """
    sources = list(blend.sources.values())
    row_tokens = blend.clock.row_tokens
    found = row_contents(blend, tokens_per_document) if contents is None else contents
    tokens_per_row, documents_per_row = np.array(found).T
    epoch_documents = np.array([max(each.documents, 1) for each in sources])
    limits = np.array([each.max_epochs or np.inf for each in sources])
    before = epochs_counted(blend)
    read = np.where(np.isnan(before), start_of(blend).documents, before * epoch_documents)
    documents_left = np.maximum(limits * epoch_documents - read, 0)
    reading = _Reading(blend, documents_left / documents_per_row, tokens_per_row)
    rows, edges = [], [start_of(blend).step]
    for begin, end in itertools.pairwise(window_edges(blend, steps)):
        drawn, last = reading.window(begin, end)
        if drawn.any():
            rows.append(drawn)
            edges.append(math.ceil(last))
        if last < end:
            break
    check_not_empty(edges)
    by_window = np.array(rows)
    documents = by_window * documents_per_row
    total = by_window.sum()
    is_random = any(node.rule == BLEND for node in blend.tree.nodes())
    # An interleave stays within about a row of its share.
    deviation = np.sqrt(reading.variance) if is_random else np.minimum(1.3, reading.variance)
    return forecast_of(
        blend,
        edges,
        tokens=by_window * tokens_per_row,
        documents=documents,
        exhausted=reading.exhausted,
        positions=round(total * row_tokens),
        is_exact=False,
        spread=2 * deviation / total,
        counted=before + np.vstack([0 * before, documents.cumsum(0) / epoch_documents]),
    )


class _Reading:
    """Counts the rows of a run in which every source is read exactly at its share.

    Args:
        left: rows that each source has left, float64 [sources]; inf without an epoch limit.
        tokens_per_row: average tokens in a row of each source, float64 [sources].

    Attributes:
        exhausted: key -> the first step without the source.
        variance: variance of the rows that a blend draws from each source, float64 [sources].
    """

    def __init__(self, blend: Blend, left: np.ndarray, tokens_per_row: np.ndarray):
        self._blend, self._left, self._tokens_per_row = blend, left, tokens_per_row
        self._mixture = Mixture(blend.tree, blend.keys)
        self._mixture.ended |= left == 0
        first = start_of(blend).step
        self.exhausted = {key: first for key, rows in zip(blend.keys, left) if rows == 0}
        self.variance = np.zeros(len(left))

    def window(self, begin: int, end: int) -> tuple[np.ndarray, float]:
        """Read steps up to ``end``; return the rows of each source, and where reading stopped.

        It stops before ``end``, perhaps inside a step, if all sources have ended.
        """
        position = position_of(self._blend, (begin + end) // 2)
        clock, rows_per_step = self._blend.clock, self._blend.topology.rows_per_step
        # Rows that are half as long are drawn twice as often.
        draws = clock.row_tokens // clock.rows.at(position) if clock.rows else 1
        missing, drawn = float(end - begin), np.zeros(len(self._left))
        while missing > 0:
            share = self._mixture.row_shares(position, self._tokens_per_row)
            if not share.any():
                break
            rate = share * rows_per_step
            lasts = np.full(len(rate), np.inf)  # steps until each source ends
            np.divide(self._left, rate, out=lasts, where=rate > 0)
            part = min(missing, float(lasts.min()))
            drawn += part * rate
            self._left -= part * rate
            self.variance += part * rows_per_step / draws * share * (1 - share)
            missing -= part
            if part == lasts.min():
                number = int(lasts.argmin())
                self._mixture.ended[number] = True
                self.exhausted[self._blend.keys[number]] = math.ceil(end - missing)
        return drawn, end - missing


def row_contents(blend: Blend, tokens_per_document: float | None = None) -> RowContents:
    """Return the mean tokens and documents per row of each source; planned ones are sampled."""
    row_tokens = blend.clock.row_tokens
    sources = blend.sources.values()
    return [_row_contents(each, row_tokens, tokens_per_document) for each in sources]


def _row_contents(
    source: Source, row_tokens: int, tokens_per_document: float | None
) -> tuple[float, float]:
    if not isinstance(source, PlannedSource):
        if tokens_per_document is None or not tokens_per_document >= 1:
            raise ConfigError(
                f"{source.key}: is streamed, so its lengths are unknown; give --tokens-per-doc."
            )
        tokens = float(row_tokens or tokens_per_document)
        return tokens, tokens / tokens_per_document
    rows = source.rows()
    first, later = rows.take(_FIRST_ROWS), rows.take(_SAMPLED_ROWS)
    sampled = later if len(later) else first
    tokens = sampled.num_tokens / len(sampled)
    if (mean := source.first_rows.tokens_per_document) is not None:
        return tokens, tokens / mean
    return tokens, max(sampled.num_documents / len(sampled), 1e-12)
