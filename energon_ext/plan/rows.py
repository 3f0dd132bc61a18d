# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The rows of one planned source: documents in an epoch order, packed by length alone.

A pack plan takes some documents that come next, and the pieces that the plan before it carried
over, and makes rows of them. So all that a state holds is what the present plan began with, and
how many of its rows were handed out: it is made again on a resume, and no token is read for it.
"""

from __future__ import annotations

from typing import Any, Mapping

import numpy as np

from energon_ext.batch.rows import Row
from energon_ext.documents.base import Documents
from energon_ext.documents.order import EpochOrder
from energon_ext.documents.permutation import stable_hash
from energon_ext.errors import ConfigError, StateFormatError
from energon_ext.packing import Packer, PackPlan, Pieces
from energon_ext.plan.row_source import RowSource, Taken

#: A pack plan takes no more than so many rows of tokens, where documents are long.
MOST_ROWS = 4096


class PlannedRows(RowSource):
    """The packed rows of documents whose lengths are known.

    Args:
        documents: of the source.
        source: key of the source, written on every row.
        packer: makes rows of documents.
        order: of the documents that are read.
        buffer_docs: documents of one pack plan.
        first: number of the document that is 0 in the order.
        excluded: numbers of documents that no pack plan takes any more, sorted, int64 [n].

    Raises:
        ConfigError: all documents are empty or excluded, or there is no such document.

    State: epoch, position, the pieces that were carried over (at most 256, or those of one row,
    two integers each), what was left out of the present plan, and the next row. ``buffer_docs`` and
    ``excluded`` may be others on a resume: the plan that was begun is finished as it was.
    """

    kind = "planned"

    def __init__(
        self,
        documents: Documents,
        *,
        source: str,
        packer: Packer,
        order: EpochOrder,
        buffer_docs: int,
        first: int = 0,
        excluded: np.ndarray | None = None,
    ):
        super().__init__(source, documents.fingerprint())
        self.documents = documents
        self._packer = packer
        self._order = order
        self._first = first
        self._buffer_docs = buffer_docs
        self._turn = stable_hash(order.key)  # who gets the odd document out
        self.excluded = np.zeros(0, np.int64) if excluded is None else excluded
        if self.excluded.max(initial=-1) >= len(documents):
            raise ConfigError(
                f"{source}: document {self.excluded[-1]} is to be excluded, of {len(documents):,}."
            )
        self._check_tokens()
        self.restart()

    def _check_tokens(self) -> None:
        """Refuse documents that are all empty or excluded: no row would ever come."""
        stop = self._first + self._order.size
        for begin in range(self._first, stop, 64):
            numbers = np.arange(begin, min(begin + 64, stop))
            if self.documents.locate(numbers)[1][~self._is_excluded(numbers)].any():
                return
        reason = "empty or excluded" if len(self.excluded) else "empty"
        raise ConfigError(f"{self.key}: all of its documents are {reason}; leave it out.")

    def _is_excluded(self, numbers: np.ndarray) -> np.ndarray:
        """Which of some documents are, bool [n]."""
        return np.isin(numbers, self.excluded)

    def restart(self) -> None:
        self._order.restart()
        self._plan = PackPlan.none()
        self._begin_with(Pieces.none(), rows_before=0)

    def read_part(self, worker: int, workers: int) -> None:
        self._order.part = (worker + self._turn) % workers, workers

    @property
    def is_finite(self) -> bool:
        return self._order.is_finite

    @property
    def ended(self) -> bool:
        return self._next_row == len(self._plan) and self._is_through

    def take(self, count: int) -> "TakenRows":
        taken = TakenRows(self.documents, self.key)
        while count and self._has_next():
            number = min(count, len(self._plan) - self._next_row)
            taken.add(self._plan, self._next_row, self._next_row + number)
            self._next_row += number
            count -= number
        return taken

    def _has_next(self) -> bool:
        while self._next_row == len(self._plan):
            if self._is_through:
                return False
            done = self._plan
            is_excluded = self._is_excluded(done.carried.documents)
            # Its first token is no label of a row before, and is counted.
            is_new_stream = self._last or bool(is_excluded[:1].any())
            rows_before = 0 if is_new_stream else self._rows_before + len(done)
            self._begin_with(done.carried[~is_excluded], rows_before)
            self._pack(self._next_documents(), last=None)
        return True

    @property
    def _is_through(self) -> bool:
        """Whether no plan follows the present one."""
        return not len(self._plan.carried) and self._order.ended

    def _begin_with(self, carried: Pieces, rows_before: int) -> None:
        self._carried = carried
        self._rows_before = rows_before
        self._next_row = 0
        self._taken: int | None = None  # documents of the plan, once there is one
        self._left_out = np.zeros(0, np.int64)  # of these, by number
        self._last = False
        self._at = self._order.epoch, self._order.position

    def _next_documents(self) -> Pieces:
        """Documents that fill the buffer: not too many, and not too long together."""
        wanted = max(1, self._buffer_docs - len(set(self._carried.documents.tolist())))
        numbers = self._order.peek(wanted) + self._first
        self._at = self._order.epoch, self._order.position
        places, lengths = self.documents.locate(numbers)
        most = MOST_ROWS * self._packer.seq_len
        fitting = int(np.searchsorted(np.cumsum(lengths), most, "right"))
        count = min(len(numbers), max(1, fitting))
        self._order.position += count
        self._taken = count
        is_excluded = self._is_excluded(numbers[:count])
        self._left_out = numbers[:count][is_excluded]
        taken = np.flatnonzero(~is_excluded)
        return Pieces.whole(numbers[taken], places[taken], lengths[taken])

    def _pack(self, documents: Pieces, last: bool | None) -> None:
        """Make rows; ``last`` says again what was so when a state was saved."""
        self._last = self._order.ended if last is None else last
        self._plan = self._packer.plan(
            self._carried, documents, rows_before=self._rows_before, last=self._last
        )

    # State --------------------------------------------------------------------------------------

    def save_state(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "documents": self.fingerprint,
            "epoch": self._at[0],
            "position": self._at[1],
            "carried": {
                "documents": self._carried.documents.tolist(),
                "starts": self._carried.starts.tolist(),
            },
            "rows_before": self._rows_before,
            "taken": self._taken,
            "left_out": self._left_out.tolist(),
            "next_row": self._next_row,
            "last": self._last,
        }

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Refuse what these documents cannot continue.

        Raises:
            StateMismatchError: the state of other documents.
            StateFormatError: the state says what no source of these documents can have said.
        """
        super().check_state(state)
        numbers, starts = state["carried"]["documents"], state["carried"]["starts"]
        is_sound = len(numbers) == len(starts) and max(numbers, default=0) < len(self.documents)
        if is_sound:
            lengths = self.documents.locate(np.array(numbers, np.int64))[1]
            is_sound = bool((np.array(starts, np.int64) < lengths).all())
        if not is_sound:
            raise StateFormatError(f"{self.key}: carries pieces that the source has not.")

    def restore_state(self, state: Mapping[str, Any]) -> None:
        self.check_state(state)
        self.restart()
        self._order.epoch, self._order.position = state["epoch"], state["position"]
        numbers = np.array(state["carried"]["documents"], np.int64)
        starts = np.array(state["carried"]["starts"], np.int64)
        places, lengths = self.documents.locate(numbers)
        carried = self._packer.resumed(Pieces(numbers, places, starts, lengths, lengths))
        self._begin_with(carried, state["rows_before"])
        if state["taken"] is None:
            return
        taken = self._order.take(state["taken"]) + self._first
        self._taken = len(taken)
        self._left_out = np.array(state["left_out"], np.int64)  # then, whatever is excluded now
        taken = taken[~np.isin(taken, self._left_out)]
        self._pack(Pieces.whole(taken, *self.documents.locate(taken)), state["last"])
        if self._taken != state["taken"] or state["next_row"] > len(self._plan):
            raise StateFormatError(
                f"{self.key}: {state['taken']} documents and row {state['next_row']} of a plan "
                f"were saved; {self._taken} documents make {len(self._plan)} rows now."
            )
        self._next_row = state["next_row"]


class TakenRows(Taken):
    """Some rows of a source, not yet read."""

    def __init__(self, documents: Documents, source: str):
        self._documents = documents
        self._source = source
        self._parts: list[tuple[int, PackPlan, int]] = []  # first row here, plan, first row there
        self.num_tokens = self.num_documents = 0
        self._count = 0

    def add(self, plan: PackPlan, first: int, stop: int) -> None:
        """Append rows of a plan."""
        self._parts.append((self._count, plan, first))
        totals = plan.totals
        tokens, documents = (totals[:, stop] - totals[:, first]).tolist()
        self.num_tokens += tokens
        self.num_documents += documents
        self._count += stop - first

    def __len__(self) -> int:
        return self._count

    def pieces(self) -> tuple[np.ndarray, np.ndarray]:
        lengths, ends, before = [], [], 0
        counts = np.diff([begin for begin, _, _ in self._parts], append=self._count)
        for (_, plan, first), count in zip(self._parts, counts.tolist()):
            start = int(plan.ends[first - 1]) if first else 0
            own = plan.ends[first : first + count] - start
            pieces = plan.pieces[start : start + int(own[-1])]
            lengths.append(pieces.stops - pieces.starts)
            ends.append(own + before)
            before += int(own[-1])
        return np.concatenate(lengths), np.concatenate(ends)

    def contents(self, number: int) -> list[tuple[int, int, int]]:
        plan, number = self._planned(number)
        return plan.pieces[plan.extent(number)].ranges()

    def row(self, number: int) -> Row:
        plan, number = self._planned(number)
        pieces, own = plan.pieces, plan.extent(number)
        places, starts, stops = (
            array[own].tolist() for array in (pieces.places, pieces.starts, pieces.stops)
        )
        read, weigh = self._documents.tokens, self._documents.label_weights
        slices = [read(place, a, b) for place, a, b in zip(places, starts, stops)]
        weights = [weigh(place, a, b) for place, a, b in zip(places, starts, stops)]
        return Row(
            slices,
            self._source,
            int(plan.documents[number]),
            label_weights=None if all(each is None for each in weights) else weights,
            num_tokens=int(plan.tokens[number]),
        )

    def _planned(self, number: int) -> tuple[PackPlan, int]:
        """The pack plan of a row, and its number there."""
        begin, plan, first = next(part for part in reversed(self._parts) if part[0] <= number)
        return plan, number + first - begin
