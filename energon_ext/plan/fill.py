# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Sources with less than one row of tokens, whose rows stay short."""

import itertools
from collections.abc import Iterator

from energon_ext.plan.blend import Blend

#: Sources that are named.
MAX_NAMED = 5


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
    for name, fullest in itertools.islice(short.items(), MAX_NAMED):
        yield (
            f"{name}: its documents together fill {fullest:.1%} of a row of "
            f"{blend.clock.row_tokens:,} positions, and no row has a document twice, so its rows "
            f"stay short. Read it together with other data as one source (a folder or a pattern of "
            f"both), or lower its weight; for text, packing='sequential' fills rows with copies."
        )
    if len(short) > MAX_NAMED:
        yield f"The rows of {len(short) - MAX_NAMED:,} more sources stay short."
