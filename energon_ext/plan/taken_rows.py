# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Rows taken from pack plans, and their descriptions, from which they are read."""

import numpy as np

from energon_ext.packing import PackPlan
from energon_ext.plan.row_source import Taken

#: ``(places, starts, stops, documents, tokens)`` of a row: its pieces, the number of documents that
#: end in it, and the number of its tokens.
Description = tuple[list[int], list[int], list[int], int, int]


class TakenRows(Taken):
    """Packed rows, not yet read."""

    def __init__(self) -> None:
        self._rows: list[tuple[PackPlan, int, int]] = []  # pack plan, row in the plan, epoch
        self.num_tokens = self.num_documents = 0

    def add(self, plan: PackPlan, first: int, stop: int, epoch: int) -> None:
        """Append rows of a plan."""
        self._rows += [(plan, row, epoch) for row in range(first, stop)]
        tokens, documents = (plan.totals[:, stop] - plan.totals[:, first]).tolist()
        self.num_tokens += tokens
        self.num_documents += documents

    def __len__(self) -> int:
        return len(self._rows)

    def pieces(self) -> tuple[np.ndarray, np.ndarray]:
        lengths = [plan.sizes[plan.extent(row)] for plan, row, _ in self._rows]
        return np.concatenate(lengths), np.cumsum([len(each) for each in lengths])

    def contents(self, number: int) -> list[tuple[int, int, int]]:
        plan, row, _ = self._rows[number]
        return plan.pieces[plan.extent(row)].ranges()

    def description(self, number: int) -> Description:
        plan, row, _ = self._rows[number]
        pieces = plan.pieces[plan.extent(row)]
        ranges = pieces.places.tolist(), pieces.starts.tolist(), pieces.stops.tolist()
        return *ranges, int(plan.documents[row]), int(plan.tokens[row])
