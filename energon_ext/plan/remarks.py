# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Lines about the sources of a blend, for people: short rows, subsets, weights in the loss."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from energon_ext.errors import printable
from energon_ext.plan.blend import Blend
from energon_ext.plan.source import PlannedSource
from energon_ext.state.match import KEPT, MOVED, SourceChange

#: Sources with short rows that are named, and those of which a subset is read.
_MAX_SHORT, _MAX_SUBSETS = 5, 20


def describe_short_sources(blend: Blend) -> Iterator[str]:
    """Yield a line with the remedies for each source that is too short to fill a row.

    Rows are not filled with copies: a step would weight these documents by chance. The share of
    rows stays as configured, and the row has padding.
    """
    short = {
        blend.names.get(key, key): fullest
        for key, source in blend.sources.items()
        if (fullest := source.fullest) < 1
    }
    for name, fullest in itertools.islice(short.items(), _MAX_SHORT):
        yield (
            f"{name}: its documents together fill {fullest:.1%} of a row of "
            f"{blend.clock.row_tokens:,} positions, and no row has a document twice, so its rows "
            f"stay short. Read it together with other data as one source (a folder or a pattern of "
            f"both), or lower its weight; for text, packing='sequential' fills rows with copies."
        )
    if len(short) > _MAX_SHORT:
        yield f"The rows of {len(short) - _MAX_SHORT:,} more sources stay short."


def describe_subsets(blend: Blend) -> Iterator[str]:
    """Yield a line for each source of which a nested subset is read."""
    found = {
        blend.names.get(key, key): source.first_rows
        for key, source in blend.sources.items()
        if isinstance(source, PlannedSource) and source.first_rows.subset is not None
    }
    for name, rows in itertools.islice(found.items(), _MAX_SUBSETS):
        assert rows.subset is not None, "others were left out"
        documents, total = rows.subset
        has_tokens = blend.clock.row_tokens and rows.epoch_tokens is not None
        tokens = f", {rows.epoch_tokens:,} tokens" if has_tokens else ""
        yield f"{name}: a subset of {documents:,} of {total:,} documents{tokens}"
    if len(found) > _MAX_SUBSETS:
        yield f"Subsets of {len(found) - _MAX_SUBSETS:,} more sources are read."


def describe_loss_weights(
    blend: Blend, changes: Sequence[SourceChange], state: Mapping[str, Any]
) -> Iterator[str]:
    """Yield a line for each source whose weight in the loss a resume changes; no row depends on it.

    Args:
        changes: effect of the resume on each source.
        state: the one that was restored.
    """
    saved = state.get("loss_weights", {})
    for change in changes:
        weight = blend.loss_weights.get(change.key)
        before = saved.get(change.saved_key or change.key, 1.0)
        now = 1.0 if weight is None else weight.to_json()
        if change.change in (KEPT, MOVED) and before != now:
            yield f"loss_weight of {printable(change.key)}: was {before} and is now {now}."
