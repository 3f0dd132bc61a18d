# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""A tokenized file as a source of rows: on arrays, never one object per document.

1. :class:`~energon_ext.document_order.DocumentOrder` says which documents come next;
2. a planner packs a buffer of them on their lengths alone;
3. a row is slices of the memory map, written when its batch is.

The state holds what the last planning began with and how many of its rows were handed out, so a
resume plans once and reads nothing that was consumed.
"""

from __future__ import annotations

from typing import Any, Iterator

import numpy as np
from megatron.energon import WorkerConfig
from megatron.energon.epathlib import EPath
from megatron.energon.flavors.base_dataset import BaseCoreDatasetFactory, SavableDataset
from megatron.energon.flavors.webdataset.structs import DatasetSubset
from megatron.energon.state import FlexState

from energon_ext.document_order import DocumentOrder
from energon_ext.errors import ConfigError, StateFormatError, StateMismatchError
from energon_ext.packing import Pieces, PlannedRows, Planner
from energon_ext.rows import Row
from energon_ext.source import global_worker, global_workers, stable_hash
from energon_ext.token_file import TokenFile

STATE_VERSION = 1


class TokenRows(SavableDataset[Row]):
    """The packed rows of one token file.

    Which rows a worker yields depends on the seed, the key, the number of workers and the planner;
    the order of documents on the seed and the key alone.

    Args:
        file: the tokens.
        source: key of the source, written on every row; it also names the order.
        planner: makes rows of documents.
        epochs: passes, None for no end.
        restarts: whether another iteration after the last epoch begins with the first one again;
            otherwise the source stays at its end, also over a save.
        shuffled: False reads the documents in order.
        subset: range of the documents, None for all.
        worker_config: Energon's.

    State: two numbers, the documents that the last planning took over from the one before it (at
    most ``carry`` of the buffer, 16 bytes each), and, after a change of the number of workers, the
    places of the epoch that were left then.
    """

    def __init__(
        self,
        file: TokenFile,
        *,
        source: str,
        planner: Planner,
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
        self._held = Pieces.none()  # by the planning that made the rows of now
        self._order_before: dict[str, Any] | None = None
        self._rows: PlannedRows | None = None
        self._next_row = 0
        self._plannings = 0
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
            self._rows, self._next_row, self._plannings = None, 0, 0

    def _active_order(self) -> DocumentOrder:
        if self._order is None:
            workers = global_workers(self.worker_config)
            # Who gets the odd document out differs from source to source.
            turn = stable_hash(self.source) % workers
            self._order = DocumentOrder(
                self.documents,
                f"{self.worker_config.seed_offset}/{self.source}",
                (global_worker(self.worker_config) + turn) % workers,
                workers,
                epochs=self._epochs,
                shuffled=self._shuffled,
            )
        return self._order

    def _plan_next(self) -> bool:
        """Plan more rows from what is held and what comes next; False at the end."""
        held = self._rows.rest if self._rows is not None else self._held
        order = self._active_order()
        if not len(held) and order.ended:
            return False
        self._held, self._order_before = held, order.save_state()
        self._plan()
        return True

    def _plan(self, last: bool | None = None) -> None:
        """Make rows; ``last`` says again that no document followed, whatever follows by now."""
        order, held = self._active_order(), self._held
        wanted = max(1, self._planner.buffer_docs - len(held))
        documents = order.take(wanted) + self._first
        _, lengths = self.file.ranges(documents)
        pieces = held + self._planner.prepare(Pieces.whole(documents, lengths))
        self._last = order.ended if last is None else last
        self._rows, self._next_row = None, 0
        if len(pieces):
            self._rows = self._planner.plan(pieces, self._plannings, last=self._last)
        self._plannings += 1

    # State --------------------------------------------------------------------------------------

    def save_state(self) -> FlexState:
        planned = self._rows is not None
        held = self._held
        return FlexState(
            __class__=type(self).__name__,
            version=STATE_VERSION,
            file=[len(self.file), self.file.num_tokens],
            order=self._order_before if planned else self._active_order().save_state(),
            held_documents=held.documents.tobytes(),
            held_starts=held.starts.tobytes(),
            plannings=self._plannings - planned,
            next_row=self._next_row if planned else None,
            last=self._last,
        )

    def restore_state(self, state: FlexState) -> None:
        if state.get("__class__") != type(self).__name__ or state.get("version") != STATE_VERSION:
            raise StateFormatError(
                f"{self.source}: a state of {state.get('__class__')!r} version "
                f"{state.get('version')!r} was found, of {type(self).__name__!r} version "
                f"{STATE_VERSION} is needed."
            )
        current = [len(self.file), self.file.num_tokens]
        order = state["order"]
        own = self._fresh_order()
        found = {
            f"{self.source}: documents and tokens of the file": (list(state["file"]), current),
            f"{self.source}: documents of an epoch": (order["size"], own.size),
            f"{self.source}: worker and workers": (
                [order["worker"], order["workers"]],
                [own.worker, own.workers],
            ),
        }
        differences = {name: pair for name, pair in found.items() if pair[0] != pair[1]}
        if differences:
            raise StateMismatchError(differences, "Use the saved file and workers.")
        own.restore_state(order)
        self._held = self._pieces(state["held_documents"], state["held_starts"])
        self._plannings = state["plannings"]
        if state["next_row"] is not None:
            self._order_before = own.save_state()
            self._plan(last=state["last"])
            self._next_row = state["next_row"]

    def _fresh_order(self) -> DocumentOrder:
        self.reset_state_own()
        return self._active_order()

    def _pieces(self, documents: bytes, starts: bytes) -> Pieces:
        documents, starts = np.frombuffer(documents, np.int64), np.frombuffer(starts, np.int64)
        _, lengths = self.file.ranges(documents)
        return self._planner.resume(Pieces(documents, starts, lengths, lengths))

    def can_restore_sample(self) -> bool:
        return False

    def assert_can_restore(self) -> None:
        raise NotImplementedError("A packed row cannot be restored from a key.")

    # Size and description -----------------------------------------------------------------------

    def len_worker(self, worker_idx: int | None = None) -> int:
        workers = global_workers(self.worker_config)
        if worker_idx is None:
            worker = global_worker(self.worker_config)
        else:
            worker = self.worker_config.rank * max(1, self.worker_config.num_workers) + worker_idx
        turn = stable_hash(self.source) % workers
        return max(0, -(-(self.documents - (worker + turn) % workers) // workers))

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


class TokenFileFactory(BaseCoreDatasetFactory):
    """A token file as Energon's metadatasets hand it to a TaskEncoder.

    Attributes:
        file: the tokens.
        training: whether the documents are to be shuffled.
        subset: of the documents, as the metadataset says it.
    """

    # No sample type: its rows are finished, and nothing is to be cooked.
    __sample_type__ = None

    def __init__(
        self,
        path: EPath,
        *,
        training: bool,
        worker_config: WorkerConfig,
        subflavors: dict[str, Any] | None = None,
        subset: DatasetSubset | None = None,
    ):
        self.paths = [path]
        self.subflavors = subflavors or {}
        self.subset = subset
        self.training = training
        self.worker_config = worker_config
        self.file = TokenFile(str(path))

    @property
    def document_range(self) -> tuple[int, int]:
        """First document and the one after the last."""
        total = len(self.file)
        return self.subset.compute_subset(total) if self.subset is not None else (0, total)

    def __len__(self) -> int:
        first, stop = self.document_range
        return stop - first

    def build(self, worker_rotation_offset: int = 0) -> SavableDataset:
        raise ConfigError(
            f"{self.paths[0]}: a token file gives packed rows; load it with a PackedTaskEncoder."
        )

    def rows(
        self, *, source: str, planner: Planner, epochs: int | None, restarts: bool
    ) -> TokenRows:
        """The rows of this file."""
        return TokenRows(
            self.file,
            source=source,
            planner=planner,
            epochs=epochs,
            restarts=restarts,
            shuffled=self.training,
            subset=self.document_range,
            worker_config=self.worker_config,
        )

    def as_file_store(self):
        raise NotImplementedError("A token file is not a file store.")
