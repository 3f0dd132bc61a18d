# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Estimate what a run will read by the shares of its schedules, window by window.

That takes as long for a million steps as for a thousand.
"""

from __future__ import annotations

import itertools
import math

import numpy as np

from energon_ext.errors import ConfigError
from energon_ext.mixture.mixture import Mixture
from energon_ext.mixture.tree import BLEND
from energon_ext.plan.forecast import (
    Forecast,
    breakpoint_steps,
    check_any,
    forecast_of,
    position_of,
    start_of,
    window_edges,
)
from energon_ext.plan.row_source import RowSource
from energon_ext.plan.rows import PlannedRows
from energon_ext.plan.source import Blend, Source

#: Rows of which the fill of all is estimated, and the fuller ones that a packer begins with.
_TRIED_ROWS, _FIRST_ROWS = 256, 256


def estimated(blend: Blend, steps: int, tokens_per_document: float | None = None) -> Forecast:
    """By summing up the shares of the weights, from where the dataset stands.

    A source of a blend is read more or less often than its share says by chance, which ``spread``
    tells.

    Args:
        tokens_per_document: of streamed sources, which do not know.

    Raises:
        ConfigError: a streamed source, and no ``tokens_per_document``; no row is left.
    """
    first = start_of(blend).step
    sources = list(blend.sources.values())
    row_tokens = blend.clock.row_tokens
    contents = [_row_contents(each, row_tokens, tokens_per_document) for each in sources]
    tokens_per_row, documents_per_row = np.array(contents).T
    limits = np.array([(each.max_epochs or np.inf) * max(each.documents, 1) for each in sources])
    documents_left = np.maximum(limits - start_of(blend).documents, 0)
    reading = _Reading(blend, documents_left / documents_per_row)
    rows, begins, ends = [], [], []
    edges = window_edges(first, steps, breakpoint_steps(blend, first, steps))
    for begin, end in itertools.pairwise(edges):
        drawn, last = reading.window(begin, end)
        if drawn.any():
            rows.append(drawn)
            begins.append(begin)
            ends.append(math.ceil(last))
        if last < end:
            break
    check_any(ends)
    by_window = np.array(rows)
    total = by_window.sum()
    is_random = any(node.rule == BLEND for node in blend.tree.nodes())
    # An interleave stays within a row or so of its share.
    deviation = np.sqrt(reading.variance) if is_random else np.minimum(1.3, reading.variance)
    return forecast_of(
        blend,
        begins,
        ends=np.array(ends),
        tokens=by_window * tokens_per_row,
        documents=by_window * documents_per_row,
        exhausted=reading.exhausted,
        positions=int(total * row_tokens),
        is_exact=False,
        spread=2 * deviation / total,
    )


class _Reading:
    """Rows that are read when every source is read exactly as often as its share says.

    Args:
        left: rows that each source has before its last epoch ends, float64 [sources].

    Attributes:
        exhausted: key -> the first step that lacks the source.
        variance: of the rows that a blend draws of each source, float64 [sources].
    """

    def __init__(self, blend: Blend, left: np.ndarray):
        first = start_of(blend).step
        self._blend, self._left = blend, left
        self._mixture = Mixture(blend.tree, blend.keys, seed="")
        self._mixture.ended |= left == 0
        self.exhausted = {key: first for key, rows in zip(blend.keys, left) if rows == 0}
        self.variance = np.zeros(len(left))

    def window(self, begin: int, end: int) -> tuple[np.ndarray, float]:
        """Rows of each source in some steps, and the place among them where all have ended."""
        position = position_of(self._blend, (begin + end) // 2)
        rows_per_step = self._blend.topology.rows_per_step
        missing, drawn = float(end - begin), np.zeros(len(self._left))
        while missing > 0 and (share := self._mixture.shares(position)).any():
            rate = share * rows_per_step
            lasts = np.full(len(rate), np.inf)  # steps until each source ends
            np.divide(self._left, rate, out=lasts, where=rate > 0)
            part = min(missing, float(lasts.min()))
            drawn += part * rate
            self._left -= part * rate
            self.variance += part * rows_per_step * share * (1 - share)
            missing -= part
            if part == lasts.min():
                self._end(int(lasts.argmin()), math.ceil(end - missing))
        return drawn, end - missing

    def _end(self, number: int, step: int) -> None:
        self._mixture.ended[number] = True
        self.exhausted[self._blend.keys[number]] = step


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
        return tokens, tokens / (rows.epoch_tokens / len(rows.kept_numbers))
    return tokens, max(tried.num_documents / len(tried), 1e-12)
