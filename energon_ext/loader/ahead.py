# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Rows of later batches, for readers whose data lies in an object store."""

import itertools
from collections import deque
from collections.abc import Iterator

from energon_ext.loader.processes import Failure
from energon_ext.loader.reader import Item
from energon_ext.plan.dataset import PlannedDataset
from energon_ext.plan.progress import DescribedRow

#: Batches that are read early.
_MOST_ROUNDS_AHEAD = 64


def rounds_ahead(dataset: PlannedDataset, num_bytes: int) -> int:
    """Batches that have as many bytes, 0 where reading early helps nothing."""
    row_bytes = max((rows.read_bytes for rows in dataset.rows), default=0)
    if not row_bytes:
        return 0
    return min(_MOST_ROUNDS_AHEAD, num_bytes // (dataset.topology.batch_rows * row_bytes))


def with_later_rows(
    rounds: Iterator[tuple[int, list[DescribedRow] | Failure]], readers: int, rounds_ahead: int
) -> Iterator[Item]:
    """Each batch, with the rows of later ones that the same reader can begin to fetch."""
    ahead = -(-rounds_ahead // readers) * readers
    known: deque[tuple[int, list[DescribedRow] | Failure]] = deque()
    for first in itertools.count():
        known.extend(itertools.islice(rounds, ahead + 1 - len(known)))
        if not known:
            return
        # The first batch of a reader has all that follow; each later one has one more.
        begin = readers if first < readers else max(readers, ahead)
        later = list(known)[begin::readers] if ahead else []
        later_rows = [row for _, rows in later if isinstance(rows, list) for row in rows]
        yield *known.popleft(), later_rows
