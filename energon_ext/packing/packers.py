# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Packers: what makes the next row."""

from __future__ import annotations

import itertools
import random
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass
from typing import Any, Hashable, Iterator, Sequence

import numpy as np

from energon_ext.errors import ConfigError, StateFormatError
from energon_ext.packing.bins import cut_into_pieces
from energon_ext.packing.fill import fill_bins

STATE_VERSION = 1

#: Of a full buffer so much is left to choose from. More of it fills bins better, and costs time.
DEFAULT_CARRY = 0.3


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens ``[start, stop)`` of a document; ``ends`` with its last one, cut for a bin."""

    document: Any
    start: int
    stop: int
    ends: bool = False


@dataclass(frozen=True, slots=True)
class RowPlan:
    """The pieces of one row, at most T + 1 tokens together.

    Attributes:
        pieces: in order of their tokens.
        documents: how many documents have their last token covered for the first time here.
    """

    pieces: tuple[Piece, ...]
    documents: int


class Packer(ABC):
    """The protocol of a packer.

    Args:
        row_length: T, positions of a row, at least 2.
    """

    def __init__(self, row_length: int):
        if isinstance(row_length, bool) or not isinstance(row_length, int) or row_length < 2:
            raise ConfigError(
                f"row_length (sequence length): {row_length!r} found, an integer >= 2 is needed; "
                f"a shorter row has no transition to train."
            )
        self.row_length = row_length

    @abstractmethod
    def add(self, document: Any, length: int) -> None:
        """Hand over the next document of ``length`` tokens; an empty one is ignored."""

    @abstractmethod
    def pop(self) -> RowPlan | None:
        """The next complete row, or None when more documents are needed first."""

    @abstractmethod
    def flush(self) -> Iterator[RowPlan]:
        """What is left at the end of a finite stream, as rows that may be short."""

    @abstractmethod
    def held_documents(self) -> list[Any]:
        """The documents of which tokens are still to come, each once, in a fixed order."""

    @abstractmethod
    def save_state(self) -> dict[str, Any]:
        """JSON values; documents are written as their index in :meth:`held_documents`."""

    @abstractmethod
    def _restore(self, state: dict[str, Any], documents: Sequence[Any]) -> None: ...

    def restore_state(self, state: dict[str, Any], documents: Sequence[Any]) -> None:
        """Continue from :meth:`save_state`.

        Args:
            documents: what :meth:`held_documents` returned at the save.
        """
        if state.get("version") != STATE_VERSION or state.get("kind") != type(self).__name__:
            raise StateFormatError(
                f"A packer state of {state.get('kind')!r} version {state.get('version')!r} was "
                f"found, {type(self).__name__!r} version {STATE_VERSION} is needed."
            )
        self._restore(state, documents)

    def _header(self) -> dict[str, Any]:
        return {"version": STATE_VERSION, "kind": type(self).__name__}


class SequentialPacker(Packer):
    """One rolling stream, windows of T + 1 tokens at stride T.

    State: the documents that reach into the current window, and how much of the first is done.

    Example:
        >>> packer = SequentialPacker(row_length=4)
        >>> for name, length in (("a", 5), ("b", 4), ("c", 6)):
        ...     packer.add(name, length)
        >>> plans = [packer.pop(), packer.pop(), packer.pop(), *packer.flush()]
        >>> [[(p.document, p.start, p.stop) for p in plan.pieces] for plan in plans]
        ... # doctest: +NORMALIZE_WHITESPACE
        [[('a', 0, 5)], [('a', 4, 5), ('b', 0, 4)], [('b', 3, 4), ('c', 0, 4)], [('c', 3, 6)]]
        >>> packer.pop() is None
        True
    """

    def __init__(self, row_length: int):
        super().__init__(row_length)
        self._stream: deque[tuple[Any, int]] = deque()
        self._start = 0  # first token of the next window, in the first document
        self._first_is_counted = False
        self._tokens = 0  # tokens in the stream from _start on

    def add(self, document: Any, length: int) -> None:
        if length > 0:
            self._stream.append((document, length))
            self._tokens += length

    def pop(self) -> RowPlan | None:
        return self._take(self.row_length + 1) if self._tokens > self.row_length else None

    def flush(self) -> Iterator[RowPlan]:
        while (plan := self.pop()) is not None:
            yield plan
        # One token that was already a label of the last window has nothing left to train.
        if self._tokens > 1 or (self._tokens == 1 and not self._first_is_counted):
            yield self._take(self._tokens)
        self._stream.clear()
        self._start = self._tokens = 0
        self._first_is_counted = False

    def _take(self, num_tokens: int) -> RowPlan:
        """The next window; all its tokens but the last leave the stream."""
        pieces: list[Piece] = []
        ended = 0
        missing = num_tokens
        while True:
            document, length = self._stream[0]
            stop = min(length, self._start + missing)
            pieces.append(Piece(document, self._start, stop))
            missing -= stop - self._start
            if stop == length and not self._first_is_counted:
                ended += 1
            if missing == 0:
                self._start = stop - 1
                self._first_is_counted = stop == length
                break
            self._stream.popleft()
            self._start = 0
            self._first_is_counted = False
        self._tokens -= num_tokens - 1
        return RowPlan(tuple(pieces), ended)

    def held_documents(self) -> list[Any]:
        return [document for document, _ in self._stream]

    def save_state(self) -> dict[str, Any]:
        return {
            **self._header(),
            "lengths": [length for _, length in self._stream],
            "start": self._start,
            "first_is_counted": self._first_is_counted,
        }

    def _restore(self, state: dict[str, Any], documents: Sequence[Any]) -> None:
        self._stream = deque(zip(documents, state["lengths"]))
        self._start = state["start"]
        self._first_is_counted = state["first_is_counted"]
        self._tokens = sum(state["lengths"]) - self._start


class BinPacker(Packer):
    """Whole documents in bins of T + 1 tokens, see :mod:`energon_ext.packing.fill`.

    Bins are filled whenever the buffer is full, until the share ``carry`` of its pieces is left;
    what is left meets the documents that come next. The bins of one filling are handed out in a
    random order that depends on its number alone: otherwise the pieces of a long document would
    make rows in a run. A bin begins with the oldest piece of the buffer, so none waits for a third
    filling, or, where no document is cut, for more than ``2 * buffer_docs`` rows.

    State: the documents of the buffer and of the bins that were filled but not handed out yet; at
    most ``buffer_docs`` documents.

    Args:
        row_length: T, positions of a row.
        buffer_docs: documents that are looked at together; more of them fill bins better.
        max_docs_per_bin: most pieces in one row, None for no limit.
        carry: share of the buffer that is left for the next bins, 0 <= carry < 1.
        alignment: positions that every document is rounded up to.

    Example:
        >>> packer = BinPacker(row_length=7, buffer_docs=4, carry=0)
        >>> for name, length in (("a", 6), ("b", 2), ("c", 6), ("d", 2)):
        ...     packer.add(name, length)
        >>> sorted([p.document for p in packer.pop().pieces] for _ in range(2))
        [['a', 'b'], ['c', 'd']]
    """

    def __init__(
        self,
        row_length: int,
        buffer_docs: int,
        max_docs_per_bin: int | None = None,
        *,
        carry: float = DEFAULT_CARRY,
        alignment: int = 1,
    ):
        super().__init__(row_length)
        check_bin_options(buffer_docs, max_docs_per_bin, carry)
        self.buffer_docs = buffer_docs
        self.max_docs_per_bin = max_docs_per_bin
        self.carry = carry
        self.alignment = alignment
        self._buffer: list[Piece] = []
        self._buffered_docs = 0
        self._plans: deque[RowPlan] = deque()
        self._fillings = 0

    def add(self, document: Any, length: int) -> None:
        if not length:
            return
        self._buffered_docs += 1
        for start, stop in cut_into_pieces(length, self.row_length + 1):
            self._buffer.append(Piece(document, start, stop, ends=stop == length))

    def pop(self) -> RowPlan | None:
        if not self._plans and self._buffered_docs >= self.buffer_docs:
            self._fill_bins(keep=int(self.carry * len(self._buffer)))
        return self._plans.popleft() if self._plans else None

    def flush(self) -> Iterator[RowPlan]:
        while self._plans or self._buffer:
            if not self._plans:
                self._fill_bins(keep=0)
            yield self._plans.popleft()

    def _fill_bins(self, keep: int) -> None:
        pieces = self._buffer
        lengths = np.array([piece.stop - piece.start for piece in pieces])
        sizes, capacity = bin_sizes(lengths, self.row_length, self.alignment)
        items, ends = fill_bins(sizes, capacity, keep=keep, max_items_per_bin=self.max_docs_per_bin)
        placed = set(items.tolist())
        self._leave([piece for index, piece in enumerate(pieces) if index not in placed])
        bins = np.split(items, ends[:-1])
        random.Random(self._fillings).shuffle(bins)
        self._fillings += 1
        for bin_items in bins:
            row = tuple(pieces[index] for index in bin_items.tolist())
            self._plans.append(RowPlan(row, sum(piece.ends for piece in row)))

    def _leave(self, pieces: list[Piece]) -> None:
        """Keep pieces for the next filling."""
        self._buffer = pieces
        self._buffered_docs = len({id(piece.document) for piece in pieces})

    def held_documents(self) -> list[Any]:
        held: dict[int, Any] = {}
        for piece in self._held_pieces():
            held.setdefault(id(piece.document), piece.document)
        return list(held.values())

    def _held_pieces(self) -> Iterator[Piece]:
        for plan in self._plans:
            yield from plan.pieces
        yield from self._buffer

    def save_state(self) -> dict[str, Any]:
        index_of: dict[Hashable, int] = {
            id(document): index for index, document in enumerate(self.held_documents())
        }
        return {
            **self._header(),
            "fillings": self._fillings,
            "pieces": [
                [index_of[id(piece.document)], piece.start, piece.stop, piece.ends]
                for piece in self._held_pieces()
            ],
            "bins": [len(plan.pieces) for plan in self._plans],
        }

    def _restore(self, state: dict[str, Any], documents: Sequence[Any]) -> None:
        self._fillings = state["fillings"]
        pieces = iter(
            [
                Piece(documents[index], start, stop, ends)
                for index, start, stop, ends in state["pieces"]
            ]
        )
        self._plans = deque()
        for count in state["bins"]:
            row = tuple(itertools.islice(pieces, count))
            self._plans.append(RowPlan(row, sum(piece.ends for piece in row)))
        self._leave(list(pieces))


def bin_sizes(lengths: np.ndarray, row_length: int, alignment: int) -> tuple[np.ndarray, int]:
    """What pieces take of a bin, and how much a bin has.

    Without alignment both are tokens, T + 1 in a bin. With it both are units of ``alignment``
    positions, of which the T + 1st token, a label alone, takes none.

    Example:
        >>> bin_sizes(np.array([3, 9]), row_length=8, alignment=1)
        (array([3, 9]), 9)
        >>> bin_sizes(np.array([3, 9]), row_length=8, alignment=4)
        (array([1, 2]), 2)
    """
    if alignment == 1:
        return lengths, row_length + 1
    positions = np.minimum(lengths, row_length)
    return -(-positions // alignment), row_length // alignment


def check_bin_options(buffer_docs: int, max_docs_per_bin: int | None, carry: float) -> None:
    """Raise ConfigError for options of bin packing that mean nothing."""
    if buffer_docs < 1:
        raise ConfigError(f"packing_buffer_docs: {buffer_docs!r} found, >= 1 is needed.")
    if max_docs_per_bin is not None and max_docs_per_bin < 1:
        raise ConfigError(
            f"packing_max_docs_per_bin: {max_docs_per_bin!r} found, >= 1 or None is needed."
        )
    if not 0 <= carry < 1:
        raise ConfigError(f"packing_carry: {carry!r} found, 0 <= carry < 1 is needed.")
