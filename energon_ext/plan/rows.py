# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""A tokenized file as a source of rows: on arrays, never one object per document.

1. :class:`~energon_ext.documents.order.DocumentOrder` says which documents come next;
2. a planner packs a buffer of them on their lengths alone;
3. a row is slices of the memory map, written when its batch is.

The state holds what the last planning began with and how many of its rows were handed out, so a
resume plans once and reads nothing that was consumed.
"""

from __future__ import annotations

import copy
from typing import Any, Iterator, Sequence

import numpy as np
from megatron.energon import WorkerConfig
from megatron.energon.flavors.base_dataset import SavableDataset
from megatron.energon.state import FlexState

from energon_ext.batch.rows import Row
from energon_ext.config.source_key import global_worker, global_workers, stable_hash
from energon_ext.documents.order import DocumentOrder, Share
from energon_ext.documents.token_file import TokenFile
from energon_ext.errors import StateFormatError, StateMismatchError
from energon_ext.packing import Pieces, PlannedRows, Planner

STATE_VERSION = 1


class TokenRows(SavableDataset[Row]):
    """The packed rows of one token file.

    Which rows a worker yields depends on the seed, the key, the number of workers and the planner;
    the order of documents on the seed and the key alone.

    Args:
        file: the tokens.
        source: key of the source, written on every row.
        planner: makes rows of documents.
        order_key: names the order of the documents, the key by default.
        epochs: passes, None for no end.
        restarts: whether another iteration after the last epoch begins with the first one again;
            otherwise the source stays at its end, also over a save.
        shuffled: False reads the documents in order.
        subset: range of the documents, None for all.
        worker_config: Energon's.

    State: some numbers, the documents that the last planning took over from the one before it (at
    most ``carry`` of the buffer, two integers each), and, after a change of the number of workers,
    what this worker was dealt of the documents that were left over then.
    """

    def __init__(
        self,
        file: TokenFile,
        *,
        source: str,
        planner: Planner,
        order_key: str | None = None,
        epochs: int | None = None,
        restarts: bool = True,
        shuffled: bool = True,
        subset: tuple[int, int] | None = None,
        worker_config: WorkerConfig,
    ):
        super().__init__(worker_config)
        self.file = file
        self.source = source
        self._planner = planner
        self._order_key = source if order_key is None else order_key
        self._epochs = epochs
        self._restarts = restarts
        self._shuffled = shuffled
        self._first, self._stop = subset or (0, len(file))
        self.reset_state_own()

    @property
    def documents(self) -> int:
        """Documents in one epoch, over all workers."""
        return self._stop - self._first

    # Iteration ----------------------------------------------------------------------------------

    def reset_state_own(self) -> None:
        self._order: DocumentOrder | None = None  # made in the worker, which knows its number
        self._hold(Pieces.none())
        self._order_before: dict[str, Any] | None = None
        self._rows: PlannedRows | None = None
        self._next_row = 0
        self._rows_before = 0  # those that this planning made
        self._last = False

    def __iter__(self) -> Iterator[Row]:
        order = self._active_order()
        tokens, source = self.file.tokens, self.source
        while True:
            rows = self._rows
            if rows is None or self._next_row == len(rows.ends):
                if not self._plan_next():
                    break
                continue
            first_tokens = self.file.ranges(rows.pieces.documents)[0] if len(rows.pieces) else None
            begins = (first_tokens + rows.pieces.starts).tolist()
            stops = (first_tokens + rows.pieces.stops).tolist()
            while self._next_row < len(rows.ends):
                number = self._next_row
                self._next_row = number + 1
                begin, end = rows.ends[number - 1] if number else 0, rows.ends[number]
                yield Row(
                    [tokens[a:b] for a, b in zip(begins[begin:end], stops[begin:end])],
                    source,
                    rows.documents[number],
                    num_tokens=rows.tokens[number],
                )
        if self._restarts:
            order.restart()
            self._rows, self._next_row, self._rows_before = None, 0, 0

    def _active_order(self) -> DocumentOrder:
        if self._order is None:
            self._order = self._order_of(
                global_worker(self.worker_config), global_workers(self.worker_config)
            )
        return self._order

    def _order_of(self, worker: int, workers: int) -> DocumentOrder:
        return DocumentOrder(
            self.documents,
            f"{self.worker_config.seed_offset}/{self._order_key}",
            self._turn(worker, workers),
            workers,
            epochs=self._epochs,
            shuffled=self._shuffled,
        )

    def _turn(self, worker: int, workers: int) -> int:
        """Who gets the odd document out differs from source to source."""
        return (worker + stable_hash(self._order_key)) % workers

    def _plan_next(self) -> bool:
        """Plan more rows from what is held and what comes next; False at the end."""
        order, held = self._active_order(), self._held
        if self._rows is not None:
            held, self._rows_before = self._rows.rest, self._rows_before + len(self._rows.ends)
        if not len(held) and order.ended:
            return False
        self._hold(held)
        self._order_before = order.save_state()
        self._plan()
        return True

    def _hold(self, pieces: Pieces) -> None:
        """Begin with pieces of the planning before; a state may be asked for at every batch."""
        self._held = pieces
        self._held_numbers = pieces.documents.tolist(), pieces.starts.tolist()

    def _plan(self, last: bool | None = None) -> None:
        """Make rows; ``last`` says again that no document followed, whatever follows by now."""
        order, held = self._active_order(), self._held
        wanted = max(1, self._planner.buffer_docs - len(np.unique(held.documents)))
        documents = order.take(wanted) + self._first
        _, lengths = self.file.ranges(documents)
        pieces = held + self._planner.prepare(Pieces.whole(documents, lengths))
        self._last = order.ended if last is None else last
        self._rows, self._next_row = None, 0
        if len(pieces):
            self._rows = self._planner.plan(pieces, self._rows_before, last=self._last)

    # State --------------------------------------------------------------------------------------

    def save_state(self) -> FlexState:
        planned = self._rows is not None
        return FlexState(
            __class__=type(self).__name__,
            version=STATE_VERSION,
            file=[len(self.file), self.file.num_tokens],
            order=self._order_before if planned else self._active_order().save_state(),
            held_documents=self._held_numbers[0],
            held_starts=self._held_numbers[1],
            rows_before=self._rows_before,
            next_row=self._next_row if planned else None,
            last=self._last,
        )

    def restore_state(self, state: FlexState) -> None:
        own = self._fresh_order()
        self._check(
            state,
            {
                "documents of an epoch": own.size,
                "worker and workers": [own.worker, own.workers],
            },
        )
        self._continue(own, state)

    def redeal(
        self, states: Sequence[FlexState], workers: int, wanted: Sequence[int]
    ) -> list[FlexState]:
        """The states of some of ``workers`` workers that continue what others did.

        The documents that the old workers held in their buffers, and the places of the epoch that
        none of them had reached, are dealt to the new ones: nothing is lost, nothing comes twice.

        Args:
            states: of every old worker.
            workers: how many there are now.
            wanted: the numbers of those whose states are returned.

        Raises:
            StateMismatchError: another file, or not the states of all workers.
        """
        orders: list[DocumentOrder] = []
        parts: list[list[Pieces]] = [[] for _ in wanted]
        dealt = 0
        for state in states:
            other = copy.copy(self)
            other.reset_state_own()
            self._check(state, {"documents of an epoch": self.documents})
            worker, workers_then = state["order"]["worker"], state["order"]["workers"]
            # The state knows the place in the deal, which is not the number of the worker.
            other._order = self._order_of(worker - self._turn(0, workers_then), workers_then)
            other._continue(other._order, state)
            orders.append(other._order)
            unread = other._unread()
            for worker, own in zip(wanted, parts):
                own.append(unread[(worker - dealt) % workers :: workers])
            dealt += len(unread)
        found = sorted(order.worker for order in orders)
        if found != list(range(orders[0].workers)):
            raise StateMismatchError(
                {f"{self.source}: workers": (found, list(range(orders[0].workers)))},
                "Give the states of all ranks.",
            )
        return [
            self._state_that_begins_with(Pieces.joined(own), orders, worker, workers)
            for worker, own in zip(wanted, parts)
        ]

    def _state_that_begins_with(
        self, held: Pieces, orders: Sequence[DocumentOrder], worker: int, workers: int
    ) -> FlexState:
        new = copy.copy(self)
        new.reset_state_own()
        new._order = self._order_of(worker, workers)
        new._order.take_over(orders)
        new._hold(held)
        return new.save_state()

    def _unread(self) -> Pieces:
        """What this worker holds in its buffers."""
        rows = self._rows or PlannedRows(Pieces.none(), [], [], [], self._held)
        return self._planner.unread(rows, self._next_row, self._rows_before)

    def _check(self, state: FlexState, current: dict[str, Any]) -> None:
        if state.get("__class__") != type(self).__name__ or state.get("version") != STATE_VERSION:
            raise StateFormatError(
                f"{self.source}: a state of {state.get('__class__')!r} version "
                f"{state.get('version')!r} was found, of {type(self).__name__!r} version "
                f"{STATE_VERSION} is needed."
            )
        order = state["order"]
        saved = {
            "documents and tokens of the file": list(state["file"]),
            "documents of an epoch": order["size"],
            "worker and workers": [order["worker"], order["workers"]],
        }
        current = {
            "documents and tokens of the file": [len(self.file), self.file.num_tokens],
            **current,
        }
        differences = {
            f"{self.source}: {name}": (saved[name], value)
            for name, value in current.items()
            if saved[name] != value
        }
        if differences:
            raise StateMismatchError(differences, "Use the saved file and workers.")

    def _continue(self, order: DocumentOrder, state: FlexState) -> None:
        order.restore_state(state["order"])
        self._hold(self._pieces(state["held_documents"], state["held_starts"]))
        self._rows_before = state["rows_before"]
        if state["next_row"] is not None:
            self._order_before = order.save_state()
            self._plan(last=state["last"])
            self._next_row = state["next_row"]

    def _fresh_order(self) -> DocumentOrder:
        self.reset_state_own()
        return self._active_order()

    def _pieces(self, documents: list[int], starts: list[int]) -> Pieces:
        documents, starts = np.array(documents, np.int64), np.array(starts, np.int64)
        _, lengths = self.file.ranges(documents)
        return self._planner.resume(Pieces(documents, starts, lengths, lengths))

    def can_restore_sample(self) -> bool:
        return False

    def assert_can_restore(self) -> None:
        raise NotImplementedError("A packed row cannot be restored from a key.")

    # Size and description -----------------------------------------------------------------------

    def len_worker(self, worker_idx: int | None = None) -> int:
        workers = global_workers(self.worker_config)
        worker = global_worker(self.worker_config, worker_idx)
        return Share.fresh(self._turn(worker, workers), workers).count(self.documents)

    def worker_has_samples(self) -> bool:
        return len(self._held) > 0 or not self._active_order().ended or self._rows is not None

    def config(self) -> dict[str, Any]:
        return {
            "type": type(self).__qualname__,
            "path": self.file.prefix,
            "documents": [self._first, self._stop],
            "epochs": self._epochs,
            "shuffled": self._shuffled,
            "planner": {"type": type(self._planner).__qualname__, **vars(self._planner)},
            "worker_config": self.worker_config.config(),
        }
