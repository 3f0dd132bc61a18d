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

#: By how many batches a reader looks further ahead with each one.
_MORE_AHEAD = 4


def rounds_ahead(dataset: PlannedDataset, num_bytes: int) -> int:
    """Batches that have as many bytes, 0 where reading early helps nothing."""
    row_bytes = max((rows.read_bytes for rows in dataset.rows), default=0)
    if not row_bytes:
        return 0
    return min(_MOST_ROUNDS_AHEAD, num_bytes // (dataset.topology.batch_rows * row_bytes))


def with_later_rows(
    rounds: Iterator[tuple[int, list[DescribedRow] | Failure]], readers: int, rounds_ahead: int
) -> Iterator[Item]:
    """Each batch, with the rows of later ones that the same reader can begin to fetch.

    A reader looks ahead further with every batch, so that the first one does not wait for the plan
    of all that follow.
    """
    most = -(-rounds_ahead // readers)  # batches of one reader
    known: deque[tuple[int, list[DescribedRow] | Failure]] = deque()
    for number in itertools.count():
        turn = number // readers
        told, window = min(most, _MORE_AHEAD * turn), min(most, _MORE_AHEAD * (turn + 1))
        known.extend(itertools.islice(rounds, window * readers + 1 - len(known)))
        if not known:
            return
        later = list(known)[max(1, told) * readers : window * readers + 1 : readers]
        later_rows = [row for _, rows in later if isinstance(rows, list) for row in rows]
        yield *known.popleft(), later_rows
