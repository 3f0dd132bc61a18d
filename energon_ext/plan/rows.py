# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The packed rows of documents, which are taken in epoch order and packed by length alone.

A pack plan turns the next documents of the order, and the pieces carried over from the previous
plan, into rows. A state contains the input of the current plan and the number of rows taken from
it. On a resume the plan is computed again, without reading any tokens.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from typing import Any, Mapping

import numpy as np

from energon_ext.batch.rows import Row
from energon_ext.errors import ConfigError, StateFormatError, StoreError
from energon_ext.packing import Packer, PackPlan, Pieces, pack_apart, saved_packer
from energon_ext.plan.order import EpochOrder
from energon_ext.plan.pack_window import PackWindow
from energon_ext.plan.row_source import RowSource
from energon_ext.plan.taken_rows import Description, TakenRows
from energon_ext.state.match import check_fingerprint
from energon_ext.tokens.base import Documents
from energon_ext.tokens.cut import CutDocuments

#: If documents are long, a pack plan takes at most this many rows of tokens.
MAX_ROWS = 4096

#: Approximate bytes per token in an object store.
_TOKEN_BYTES = 4


class PlannedRows(RowSource):
    """The packed rows of documents whose lengths are known.

    Args:
        documents: documents of the source.
        source: key of the source, set on every row.
        packer: packs documents into rows.
        order: order in which the documents are read.
        buffer_docs: number of documents in one pack plan.
        first: number of the document that the order calls 0.
        excluded: numbers of documents that no later pack plan takes, sorted, int64 [n].

    Raises:
        ConfigError: all documents are empty or excluded, or an excluded one does not exist.

    State: a :class:`PackWindow`, with two integers per carried-over piece. ``buffer_docs``,
    ``excluded`` and the epochs of ``order`` may change between two steps; the current pack plan is
    then finished as it was begun. The packer may change, too: the rest of the current plan is then
    packed again, before any further documents.
    """

    kind = "planned"
    window: PackWindow

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
        is_remote = getattr(documents, "is_remote", False)
        self.read_bytes = packer.seq_len * _TOKEN_BYTES if is_remote else 0
        self._packer = packer
        self._order = order
        self.epoch_documents = order.size  # conversations may become several documents
        self._first = first
        self._buffer_docs = buffer_docs
        self.excluded = np.zeros(0, np.int64) if excluded is None else excluded
        if self.excluded.max(initial=-1) >= len(documents):
            raise ConfigError(
                f"{source}: cannot exclude document {self.excluded[-1]}; there are only "
                f"{len(documents):,}, counted from 0."
            )
        self._check_tokens()
        self.restart()

    def _check_tokens(self) -> None:
        """Raise ConfigError if all documents are empty or excluded: there would never be a row."""
        stop = self._first + self._order.size
        for begin in range(self._first, stop, 64):
            numbers = np.arange(begin, min(begin + 64, stop))
            if self.documents.locate(numbers)[1][~_among(numbers, self.excluded)].any():
                return
        reason = "empty or excluded" if len(self.excluded) else "empty"
        raise ConfigError(f"{self.key}: all documents are {reason}; remove the source.")

    def options(self) -> dict[str, Any]:
        return {
            "max_epochs": self._order.epochs,
            "packing_buffer_docs": self._buffer_docs,
            "exclude": self.excluded.tolist(),
        }

    def restart(self) -> None:
        self._order.restart()
        self.window, self._plan, self.next_row = PackWindow(epoch=0, position=0), PackPlan.none(), 0

    def begin_pass(self) -> None:
        self._order.begin_again()
        self.window = dataclasses.replace(self.window, pass_start=self._order.first)

    def fork(self) -> PlannedRows:
        other = copy.copy(self)
        other._order = copy.copy(self._order)
        return other

    @property
    def kept_numbers(self) -> np.ndarray:
        """Numbers of the documents in an epoch, without excluded ones."""
        numbers = np.arange(self._first, self._first + self._order.size)
        return numbers[~_among(numbers, self.excluded)]

    @functools.cached_property
    def epoch_tokens(self) -> int:
        """Tokens in one epoch; only excluded documents are looked up, and only once."""
        stop = self._first + self._order.size
        is_in_epoch = (self._first <= self.excluded) & (self.excluded < stop)
        excluded = self.documents.locate(self.excluded[is_in_epoch])[1].sum()
        return self.documents.tokens_in(self._first, stop) - int(excluded)

    @property
    def is_finite(self) -> bool:
        return self._order.is_finite

    @property
    def ended(self) -> bool:
        is_plan_taken = self.next_row == len(self._plan)
        return is_plan_taken and not len(self._plan.carried) and self._order.ended

    def take(self, count: int) -> "TakenRows":
        taken = self._taken()
        while count and not self.ended:
            if self.next_row == len(self._plan):
                self._pack_next()
            number = min(count, len(self._plan) - self.next_row)
            taken.add(self._plan, self.next_row, self.next_row + number, self.window.epoch)
            self.next_row += number
            count -= number
        return taken

    def _taken(self) -> "TakenRows":
        return TakenRows()

    def _pack_next(self) -> None:
        """Compute the pack plan that follows the current one."""
        carried = self._plan.carried
        is_excluded = _among(carried.documents, self.excluded)
        # The first token of a new stream was not the label of an earlier row.
        is_new_stream = self.window.is_last or bool(is_excluded[:1].any())
        rows_before = 0 if is_new_stream else self.window.rows_before + len(self._plan)
        carried = carried[~is_excluded]
        wanted = max(1, self._buffer_docs - len(set(carried.documents.tolist())))
        numbers = self._order.peek(wanted) + self._first
        epoch, position = self._order.epoch, self._order.position
        places, lengths = self.documents.locate(numbers)
        most = MAX_ROWS * self._packer.seq_len
        fitting = int(np.searchsorted(np.cumsum(lengths), most, "right"))
        count = min(len(numbers), max(1, fitting))
        self._order.position += count
        is_excluded = _among(numbers[:count], self.excluded)
        kept = np.flatnonzero(~is_excluded)
        window = PackWindow(
            pass_start=self._order.first,
            epoch=epoch,
            position=position,
            documents=carried.documents,
            starts=carried.starts,
            stops=self._saved_stops(carried),
            rows_before=rows_before,
            taken=count,
            excluded=numbers[:count][is_excluded],
            is_last=self._order.ended,
        )
        new = Pieces.whole(numbers[kept], places[kept], lengths[kept])
        self._pack(self._packer, window, carried, new)

    def _saved_stops(self, carried: Pieces) -> np.ndarray | None:
        """Return the stops of carried-over pieces to save; None if the packer can compute them."""
        whole = dataclasses.replace(carried, stops=carried.lengths)
        is_implied = np.array_equal(carried.stops, self._packer.resumed(whole).stops)
        return None if is_implied else carried.stops

    def _pack(self, packer: Packer, window: PackWindow, carried: Pieces, new: Pieces) -> None:
        self._plan = pack_apart(
            packer, carried, new, rows_before=window.rows_before, last=window.is_last
        )
        self.window = dataclasses.replace(window, digest=self._plan.digest)
        self.next_row = 0

    def prefetch(self, description: Description) -> None:
        if self.read_bytes:
            for piece in zip(*description[:3]):
                self.documents.prefetch(*piece)  # type: ignore[attr-defined]  # they are remote

    def read(self, description: Description) -> Row:
        places, starts, stops, documents, tokens = description
        read, weigh = self.documents.tokens, self.documents.label_weights
        pieces = list(zip(places, starts, stops))
        try:
            weights = [weigh(*piece) for piece in pieces]
            read_tokens = [read(*piece) for piece in pieces]
        except StoreError as error:
            raise StoreError(f"{self.key}: {error}") from error
        return Row(
            read_tokens,
            self.key,
            documents,
            label_weights=None if all(each is None for each in weights) else weights,
            num_tokens=tokens,
        )

    # State --------------------------------------------------------------------------------------

    @property
    def may_be_repacked(self) -> bool:
        return not isinstance(self.documents, CutDocuments)

    def former_packer(self, packing: Mapping[str, Any]) -> Packer:
        return saved_packer(packing)

    def _documents_of(self, packer: Packer) -> Documents:
        """Return the documents as seen by a packer."""
        return self.documents

    def restore_state(self, state: Mapping[str, Any], former: Packer | None = None) -> None:
        self.check_state(state)
        self.restart()
        packer = former or self._packer
        documents = self._documents_of(packer)
        window = self.window = PackWindow.from_json(state)
        carried = window.carried_of(documents, packer)
        if carried is None:
            raise StateFormatError(f"{self.key}: the state has pieces that the source lacks.")
        self._order.epoch, self._order.position = window.epoch, window.position
        self._order.first = window.pass_start
        if window.taken is None:  # saved before the first plan, or the first one after a repacking
            self._plan = dataclasses.replace(PackPlan.none(), carried=carried)
        else:
            taken = self._order.take(window.taken) + self._first
            kept = taken[~_among(taken, window.excluded)]  # as excluded when it was saved
            self._pack(packer, window, carried, Pieces.whole(kept, *documents.locate(kept)))
            if len(taken) != window.taken or state["next_row"] > len(self._plan):
                raise StateFormatError(
                    f"{self.key}: saved at row {state['next_row']} of a plan of {window.taken} "
                    f"documents; now {len(taken)} documents give {len(self._plan)} rows."
                )
            check_fingerprint(
                {"rows of the open plan": window.digest},
                {"rows of the open plan": self.window.digest},
                self.key,
                "The same documents give different rows: another version saved the state, or a "
                "custom packer depends on more than lengths and options (`self.seq_len` for "
                "`select_samples_to_pack`).",
            )
        self.next_row = state["next_row"]
        if packer != self._packer:
            self._repack(packer)

    def _repack(self, former: Packer) -> None:
        """Turn all pieces left in the current plan into carried-over pieces of the next one."""
        plan, window = self._plan, self.window
        taken = plan.extent(self.next_row - 1).stop if self.next_row else 0
        rest = plan.pieces[taken:] + plan.carried
        rows_before = 0
        if former.cuts_documents:
            rows_before = window.rows_before + self.next_row if len(rest) else 0  # a new stream
            rest = rest.with_windows_joined(plan.ends[self.next_row :] - taken)
            # If one token is left of a document, it was the last label read; skip it.
            is_read = rest.starts[:1] == rest.lengths[:1] - 1
            if rows_before and not self._packer.cuts_documents and is_read.any():
                rest = rest[1:]
        else:  # rows are in random order
            rest = rest[np.lexsort((rest.starts, rest.documents))].joined()
        rest = rest[self.documents.locate(rest.documents)[1] > 0]  # excluded ones may not fit: 0
        self.window = PackWindow(
            pass_start=self._order.first,
            epoch=self._order.epoch,
            position=self._order.position,
            documents=rest.documents,
            starts=rest.starts,
            stops=self._saved_stops(rest),
            rows_before=rows_before,
        )
        self._plan, self.next_row = dataclasses.replace(PackPlan.none(), carried=rest), 0


def _among(numbers: np.ndarray, excluded: np.ndarray) -> np.ndarray:
    """Return whether each number is excluded, bool [n]."""
    # Most sources exclude nothing, and np.isin is slow even then.
    return np.isin(numbers, excluded) if len(excluded) else np.zeros(len(numbers), bool)
