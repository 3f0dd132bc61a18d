# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Sources of which a run reads a nested subset, for people."""

import itertools
from collections.abc import Iterator

from energon_ext.plan.blend import Blend
from energon_ext.plan.source import PlannedSource

#: Sources that are named.
MAX_NAMED = 20


def describe_subsets(blend: Blend) -> Iterator[str]:
    """Yield a line for each source of which a nested subset is read."""
    found = {
        blend.names.get(key, key): source.first_rows
        for key, source in blend.sources.items()
        if isinstance(source, PlannedSource) and source.first_rows.subset is not None
    }
    for name, rows in itertools.islice(found.items(), MAX_NAMED):
        assert rows.subset is not None, "others were left out"
        documents, total = rows.subset
        has_tokens = blend.clock.row_tokens and rows.epoch_tokens is not None
        tokens = f", {rows.epoch_tokens:,} tokens" if has_tokens else ""
        yield f"{name}: a subset of {documents:,} of {total:,} documents{tokens}"
    if len(found) > MAX_NAMED:
        yield f"Subsets of {len(found) - MAX_NAMED:,} more sources are read."
