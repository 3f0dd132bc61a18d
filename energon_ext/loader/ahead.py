# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Passes rows of later batches to readers, which prefetch them from an object store."""

import itertools
from collections import deque
from collections.abc import Iterator

from energon_ext.loader.planned_dataset import PlannedDataset
from energon_ext.loader.processes import Failure
from energon_ext.loader.reader import Item
from energon_ext.plan.progress import DescribedBatch

#: Maximum number of batches to prefetch.
_MAX_ROUNDS_AHEAD = 64

#: Batches by which a reader extends its look-ahead with each batch.
_MORE_AHEAD = 4


def rounds_ahead(dataset: PlannedDataset, num_bytes: int) -> int:
    """Return how many batches fit into ``num_bytes``; 0 if prefetching does not help."""
    row_bytes = max((reader.row_bytes for reader in dataset.batches.readers), default=0)
    if not row_bytes:
        return 0
    return min(_MAX_ROUNDS_AHEAD, num_bytes // (dataset.run.topology.batch_rows * row_bytes))


def with_later_rows(
    rounds: Iterator[tuple[int, DescribedBatch | Failure]], readers: int, rounds_ahead: int
) -> Iterator[Item]:
    """Yield each batch with the rows of later batches that the same reader can start to fetch.

    A reader looks further ahead with every batch, so that the first batch does not wait for the
    plan of all later ones.
    """
    most = -(-rounds_ahead // readers)  # batches per reader
    planned: deque[tuple[int, DescribedBatch | Failure]] = deque()
    for number in itertools.count():
        turn = number // readers
        before, now = min(most, _MORE_AHEAD * turn), min(most, _MORE_AHEAD * (turn + 1))
        planned.extend(itertools.islice(rounds, now * readers + 1 - len(planned)))
        if not planned:
            return
        later = list(planned)[max(1, before) * readers : now * readers + 1 : readers]
        batches = [each for _, each in later if isinstance(each, DescribedBatch)]
        later_rows = [row for batch in batches for row in batch.rows]
        yield *planned.popleft(), later_rows
