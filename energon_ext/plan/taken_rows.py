# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Rows taken from pack plans, and their descriptions, from which they are read."""

import numpy as np

from energon_ext.packing import PackPlan, Pieces
from energon_ext.plan.rows import TakenRows
from energon_ext.tokens.documents import Lengths

#: ``(documents, starts, stops, visits, ended, tokens)`` of a row: its pieces, how many documents
#: end in it, and the number of its tokens.
Description = tuple[list[int], list[int], list[int], list[int], int, int]


class TakenPackedRows(TakenRows):
    """Packed rows, not yet read."""

    def __init__(self, lengths: Lengths) -> None:
        self._lengths = lengths
        self._rows: list[tuple[PackPlan, int]] = []  # pack plan, row in the plan
        self.num_tokens = self.num_documents = 0

    def add(self, plan: PackPlan, first: int, stop: int) -> None:
        """Append rows of a plan."""
        self._rows += [(plan, row) for row in range(first, stop)]
        tokens, documents = (plan.totals[:, stop] - plan.totals[:, first]).tolist()
        self.num_tokens += tokens
        self.num_documents += documents

    def __len__(self) -> int:
        return len(self._rows)

    def pieces(self) -> tuple[np.ndarray, np.ndarray]:
        lengths = [plan.sizes[plan.extent(row)] for plan, row in self._rows]
        return np.concatenate(lengths), np.cumsum([len(each) for each in lengths])

    def further_costs(self) -> np.ndarray:
        costs = [self._lengths.costs(self._pieces(row).documents).sum() for row in range(len(self))]
        return np.array(costs, np.float64)

    def contents(self, number: int) -> list[tuple[int, int, int]]:
        return self._pieces(number).ranges()

    def description(self, number: int) -> Description:
        plan, row = self._rows[number]
        pieces, part = plan.pieces, plan.extent(row)
        columns = pieces.documents, pieces.starts, pieces.stops, pieces.visits
        documents, starts, stops, visits = (column[part].tolist() for column in columns)
        ended, tokens = int(plan.documents[row]), int(plan.tokens[row])
        return documents, starts, stops, visits, ended, tokens

    def _pieces(self, number: int) -> Pieces:
        plan, row = self._rows[number]
        return plan.pieces[plan.extent(row)]
