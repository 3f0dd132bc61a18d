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
import itertools
from collections.abc import Callable
from typing import Any, Mapping, Sequence

import numpy as np

from energon_ext.errors import ConfigError, StateFormatError
from energon_ext.packing import BestFitPacker, Packer, PackPlan, Pieces, load_packer, pack_apart
from energon_ext.plan.arrangement import arrangement_from_state
from energon_ext.plan.epochs import EpochCount
from energon_ext.plan.order import EpochOrder
from energon_ext.plan.pack_window import PackWindow
from energon_ext.plan.rows import Rows, TakenRows
from energon_ext.plan.spec import DOCUMENTS
from energon_ext.state.match import check_fingerprint
from energon_ext.tokens.documents import Lengths

#: Builds a packer from ``(its JSON, positions of a row, the current packer)``.
LoadPacker = Callable[[Mapping[str, Any], int, Packer], Packer]

#: ``(documents, starts, stops, visits, ended, tokens)`` of a row: its pieces, how many
#: documents end in it, and the number of its tokens.
Description = tuple[list[int], list[int], list[int], list[int], int, int]

#: Documents in the first pack plan of a run.
_FIRST_DOCS = 64

#: Documents of a subset whose lengths are summed at once.
_SUMMED_DOCS = 1 << 20

#: If documents are long, a pack plan takes at most this many rows of tokens.
MAX_ROWS = 4096


class PackedRows(Rows):
    """The packed rows of documents whose lengths are known.

    Args:
        lengths: lengths of the documents of the source.
        source: key of the source.
        packer: packs documents into rows.
        order: order in which the documents are read.
        buffer_docs: number of documents in one pack plan.
        first: number of the document that the order calls 0.
        excluded: numbers of documents that no later pack plan takes, sorted, int64 [n].
        kind: names the kind of rows in a state.
        load_packer: builds an earlier packer of these rows, so that they may be packed in another
            way after a resume; None if they must not.

    Raises:
        ConfigError: all documents are empty or excluded, or an excluded one does not exist.

    State: a :class:`PackWindow`, with three integers per carried-over piece. ``buffer_docs``,
    ``excluded`` and the epochs of ``order`` may change between two steps; the current pack plan is
    then finished as it was begun. So may the blocks, arrangement and subset of ``order``; the epoch
    is then finished in its own. The packer may change, too: the rest of the current plan is then
    packed again, before any further documents.
    """

    window: PackWindow
    can_exclude = True

    def __init__(
        self,
        lengths: Lengths,
        *,
        source: str,
        packer: Packer,
        order: EpochOrder,
        buffer_docs: int,
        first: int = 0,
        excluded: np.ndarray | None = None,
        kind: str = DOCUMENTS,
        load_packer: LoadPacker | None = load_packer,
    ):
        super().__init__(source, lengths.fingerprint())
        self.kind = kind
        self.lengths = lengths
        self._packer = packer
        self._load_packer = load_packer
        self.may_be_repacked = load_packer is not None
        self._order = order
        self._first = first
        if order.subset is not None:
            self.subset = order.subset, order.size
        self._buffer_docs = buffer_docs
        self.excluded = np.zeros(0, np.int64) if excluded is None else excluded
        if self.excluded.max(initial=-1) >= len(lengths):
            raise ConfigError(
                f"{source}: cannot exclude document {self.excluded[-1]}; there are only "
                f"{len(lengths):,}, counted from 0."
            )
        self._check_tokens()
        self._tokens_by_subset: dict[int, int] = {}
        self._summed = (0, 0, 0)  # epoch, its documents that were summed, their tokens
        self.window, self._plan, self.next_row = PackWindow(epoch=0, position=0), PackPlan.none(), 0

    def _check_tokens(self) -> None:
        """Raise ConfigError if all documents are empty or excluded: there would never be a row."""
        stop = self._order.documents
        for begin in range(0, stop, 64):
            places = np.arange(begin, min(begin + 64, stop))
            numbers = self._order.among(self._order.subset, places) + self._first
            if self.lengths.lengths(numbers)[~_among(numbers, self.excluded)].any():
                return
        reason = "empty or excluded" if len(self.excluded) else "empty"
        raise ConfigError(f"{self.key}: all documents are {reason}; remove the source.")

    def options(self) -> dict[str, Any]:
        has_blocks = self.kind == DOCUMENTS and self._order.block > 1
        return {
            "max_epochs": self._order.epochs,
            "packing_buffer_docs": self._buffer_docs,
            "exclude": self.excluded.tolist(),
            **({"block_docs": self._order.block} if has_blocks else {}),
            **({"order": order.to_json()} if (order := self._order.arrangement) else {}),
            **({} if self._order.subset is None else {"subset": self._order.subset}),
            **self.lengths.options(),
        }

    def begin_pass(self) -> None:
        self._order.begin_again()
        self.window = dataclasses.replace(self.window, pass_start=self._order.first)

    def at(self, window: PackWindow, next_row: int) -> PackedRows:
        other = copy.copy(self)
        other._order = copy.copy(self._order)
        if window is self.window:
            other.next_row = next_row
        else:
            other.restore_state(self.state_at(window, next_row))
        return other

    def with_length(self, row_tokens: int) -> PackedRows:
        other = copy.copy(self)
        other._packer = dataclasses.replace(self._packer, seq_len=row_tokens)
        return other

    def repack(self, row_tokens: int) -> None:
        former, self._packer = self._packer, self.with_length(row_tokens)._packer
        self._repack(former)

    @property
    def stored_documents(self) -> int:
        return len(self.lengths)

    @property
    def subset_change(self) -> tuple[int, int] | None:
        """Documents of the current epoch, if it has begun, and of the next one; None if as many."""
        now, then = self._order.epoch_size, self._order.documents
        return None if now == then else (now, then)

    @property
    def epoch_count(self) -> EpochCount | None:
        order, plan = self._order, self._plan
        if order.subset is None and order.chosen is None:
            return None
        in_rows = plan.totals[0, -1] - plan.totals[0, self.next_row]
        in_pieces = (plan.carried.stops - plan.carried.starts).sum()
        read = self._tokens_taken() - int(in_rows + in_pieces)
        size = self._tokens_of(order.epoch_size)
        return EpochCount(order.epoch + 1, max(0, size - read), size)

    def _tokens_taken(self) -> int:
        """Return the tokens of the documents that were taken in this epoch; each summed once."""
        order = copy.copy(self._order)
        epoch, position, tokens = self._summed
        if epoch != order.epoch or position > order.position:
            position = tokens = 0
        stop, order.position = order.position, position
        while order.position < stop:
            numbers = order.take(min(_SUMMED_DOCS, stop - order.position)) + self._first
            tokens += self._sum_tokens(numbers)
        self._summed = order.epoch, stop, tokens
        return tokens

    def _sum_tokens(self, numbers: np.ndarray) -> int:
        """Return the tokens of documents, without those that are excluded."""
        return int(self.lengths.lengths(numbers[~_among(numbers, self.excluded)]).sum())

    @functools.cached_property
    def _left_out(self) -> np.ndarray:
        """The excluded documents among those of an epoch."""
        excluded = self._excluded_of_source
        if self._order.subset is None or not len(excluded):
            return excluded
        places = np.arange(self._order.documents)
        chosen = self._order.among(self._order.subset, places) + self._first
        return excluded[np.isin(excluded, chosen)]

    @property
    def _excluded_of_source(self) -> np.ndarray:
        first, stop = self._first, self._first + self._order.size
        return self.excluded[(first <= self.excluded) & (self.excluded < stop)]

    @property
    def _documents(self) -> int:
        """Documents that are read in an epoch."""
        return self._order.documents - len(self._left_out)

    @property
    def epoch_tokens(self) -> int:
        return self._tokens_of(self._order.documents)

    @property
    def source_tokens(self) -> int:
        return self._tokens_of(self._order.size)

    def _tokens_of(self, subset: int) -> int:
        """Return the tokens of the first documents of the subset's order, summed only once.

        Of all of them, only those that are excluded are looked up.
        """
        if subset in self._tokens_by_subset:
            return self._tokens_by_subset[subset]
        if subset == self._order.size:
            first, stop = self._first, self._first + self._order.size
            left_out = self.lengths.lengths(self._excluded_of_source)
            tokens = self.lengths.tokens_in(first, stop) - int(left_out.sum())
        else:
            bounds = itertools.pairwise([*range(0, subset, _SUMMED_DOCS), subset])
            chunks = (self._order.among(subset, np.arange(*each)) for each in bounds)
            tokens = sum(self._sum_tokens(chunk + self._first) for chunk in chunks)
        self._tokens_by_subset[subset] = tokens
        return tokens

    @property
    def fullest(self) -> float:
        """The largest part of a row that the documents can fill, 1 for all of it.

        :class:`~energon_ext.packing.BestFitPacker` puts no document into a row twice, so a source
        with less than a row of tokens has short rows however often it is read.
        """
        is_short = self._documents < self._packer.seq_len  # tokens, if one each
        if self._order.epochs == 1 or not is_short or not isinstance(self._packer, BestFitPacker):
            return 1.0
        return min(1.0, self.epoch_tokens / self._packer.seq_len)

    @property
    def tokens_per_document(self) -> float:
        return self.epoch_tokens / self._documents

    @property
    def is_finite(self) -> bool:
        return self._order.is_finite

    @property
    def ended(self) -> bool:
        is_plan_taken = self.next_row == len(self._plan)
        return is_plan_taken and not len(self._plan.carried) and self._order.ended

    def take(self, count: int) -> TakenPackedRows:
        taken = TakenPackedRows(self.lengths)
        while count and not self.ended:
            if self.next_row == len(self._plan):
                self._pack_next()
            number = min(count, len(self._plan) - self.next_row)
            taken.add(self._plan, self.next_row, self.next_row + number)
            self.next_row += number
            count -= number
        return taken

    def _pack_next(self) -> None:
        """Compute the pack plan that follows the current one."""
        carried = self._plan.carried
        is_excluded = _among(carried.documents, self.excluded)
        # The first token of a new stream was not the label of an earlier row.
        is_new_stream = self.window.is_last or bool(is_excluded[:1].any())
        rows_before = 0 if is_new_stream else self.window.rows_before + len(self._plan)
        carried = carried[~is_excluded]
        numbers = self._order.peek(self._wanted(carried)) + self._first
        epoch, position = self._order.epoch, self._order.position
        if self.lengths.is_large:
            self.lengths.request(numbers)
        lengths = self.lengths.lengths(numbers)
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
            blocks=self._order.blocks,
            arranged=self._order.saved_arrangement(),
            chosen=self._order.chosen,
            documents=carried.documents,
            starts=carried.starts,
            stops=self._saved_stops(carried),
            visits=carried.visits,
            rows_before=rows_before,
            taken=count,
            excluded=numbers[:count][is_excluded],
            is_last=self._order.ended,
        )
        new = Pieces.whole(numbers[kept], lengths[kept], epoch)
        if self.lengths.is_large:
            self._request_next()
        self._pack(self._packer, window, carried, new)

    def _wanted(self, carried: Pieces) -> int:
        """Return how many documents the next pack plan takes.

        The first plans of a run are small, so that its first batch does not wait for the lengths of
        documents that are read much later. They double up to the size of a buffer.
        """
        kept = len(set(carried.documents.tolist()))
        taken = self._order.epoch * self._order.epoch_size + self._order.position
        return max(1, min(self._buffer_docs - kept, max(_FIRST_DOCS, taken)))

    def _request_next(self) -> None:
        """Ask for the lengths of the next pack plan, which arrive while this one is packed."""
        order = copy.copy(self._order)
        self.lengths.request(order.peek(self._buffer_docs) + self._first)

    def _saved_stops(self, carried: Pieces) -> np.ndarray | None:
        """Return the stops of carried-over pieces to save; None if the packer can compute them."""
        whole = dataclasses.replace(carried, stops=carried.lengths)
        is_implied = np.array_equal(carried.stops, self._packer.with_stops(whole).stops)
        return None if is_implied else carried.stops

    def _pack(self, packer: Packer, window: PackWindow, carried: Pieces, new: Pieces) -> None:
        self._plan = pack_apart(
            packer, carried, new, rows_before=window.rows_before, last=window.is_last
        )
        self.window = dataclasses.replace(window, digest=self._plan.digest)
        self.next_row = 0

    # State --------------------------------------------------------------------------------------

    def restore_state(
        self, state: Mapping[str, Any], packing: Mapping[str, Any] | None = None
    ) -> None:
        self.check_state(state)
        packer = self._packer
        if packing is not None:
            assert self._load_packer is not None, "only rows that may be repacked are restored so"
            packer = self._load_packer(packing["packer"], packing["row_tokens"], self._packer)
        same = packer.seq_len == self._packer.seq_len
        lengths = self.lengths if same else self.lengths.for_rows(packer.seq_len)
        window = self.window = PackWindow.from_json(state)
        carried = window.carried_of(lengths, packer)
        if carried is None:
            raise StateFormatError(f"{self.key}: the state has pieces that the source lacks.")
        self._order.restart()
        self._order.epoch, self._order.position = window.epoch, window.position
        self._order.first = window.pass_start
        if window.position or window.taken:  # of an epoch that has begun
            self._order.blocks = window.blocks or self._order.blocks
            self._order.chosen = self._chosen_of(window)
            self._order.restore_arrangement(arrangement_from_state(window.arranged))
        if window.taken is None:  # saved before the first plan, or the first one after a repacking
            self._plan = dataclasses.replace(PackPlan.none(), carried=carried)
        else:
            taken = self._order.take(window.taken) + self._first
            kept = taken[~_among(taken, window.excluded)]  # as excluded when it was saved
            new = Pieces.whole(kept, lengths.lengths(kept), window.epoch)
            self._pack(packer, window, carried, new)
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

    def _chosen_of(self, window: PackWindow) -> int | None:
        """Return the size of the subset of an epoch that has begun."""
        size = self._order.size
        if window.chosen is not None and not 1 <= window.chosen <= size:
            raise StateFormatError(
                f"{self.key}: a subset of {window.chosen:,} documents found; the source has "
                f"{size:,}, so the state is damaged."
            )
        return window.chosen

    def _repack(self, former: Packer) -> None:
        """Turn all pieces left in the current plan into carried-over pieces of the next one."""
        plan, window = self._plan, self.window
        taken = plan.extent(self.next_row - 1).stop if self.next_row else 0
        rest = plan.pieces[taken:] + plan.carried
        rows_before = 0
        if former.cuts_documents:
            rows_before = window.rows_before + self.next_row if len(rest) else 0  # a new stream
            rest = rest.join_windows(plan.ends[self.next_row :] - taken)
            # If one token is left of a document, it was the last label read; skip it.
            is_read = rest.starts[:1] == rest.lengths[:1] - 1
            if rows_before and not self._packer.cuts_documents and is_read.any():
                rest = rest[1:]
        else:  # rows are in random order
            rest = rest[np.lexsort((rest.starts, rest.documents))].join()
        rest = rest[self.lengths.lengths(rest.documents) > 0]  # excluded ones may not fit: 0
        self.window = PackWindow(
            pass_start=self._order.first,
            epoch=self._order.epoch,
            position=self._order.position,
            blocks=self._order.blocks,
            arranged=self._order.saved_arrangement(),
            chosen=self._order.chosen,
            documents=rest.documents,
            starts=rest.starts,
            stops=self._saved_stops(rest),
            visits=rest.visits,
            rows_before=rows_before,
        )
        self._plan, self.next_row = dataclasses.replace(PackPlan.none(), carried=rest), 0


def _among(numbers: np.ndarray, excluded: np.ndarray) -> np.ndarray:
    """Return whether each number is excluded, bool [n]."""
    # Most sources exclude nothing, and np.isin is slow even then.
    return np.isin(numbers, excluded) if len(excluded) else np.zeros(len(numbers), bool)


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

    def description_of_pieces(self, places: Sequence[tuple[int, int]]) -> Description:
        documents, starts, stops, visits = [], [], [], []
        ended = 0
        for number, piece in places:
            plan, row = self._rows[number]
            pieces, index = plan.pieces, plan.extent(row).start + piece
            documents.append(int(pieces.documents[index]))
            starts.append(int(pieces.starts[index]))
            stops.append(int(pieces.stops[index]))
            visits.append(int(pieces.visits[index]))
            ended += self._ends(number, piece)
        tokens = sum(stops) - sum(starts)
        return documents, starts, stops, visits, ended, tokens

    def _ends(self, number: int, piece: int) -> bool:
        """Return whether a document ends with a piece of a row, as the pack plan counts it."""
        plan, row = self._rows[number]
        part = plan.extent(row)
        is_last = plan.pieces.stops[part] == plan.pieces.lengths[part]
        if piece or is_last.sum() == plan.documents[row]:
            return bool(is_last[piece])
        return False  # a window of a stream begins with the last label of the one before

    def _pieces(self, number: int) -> Pieces:
        plan, row = self._rows[number]
        return plan.pieces[plan.extent(row)]
