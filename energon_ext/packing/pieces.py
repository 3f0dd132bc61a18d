# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Input and output of packers as arrays: pieces of documents, and rows built from them."""

import functools
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from energon_ext.keyed import sha256


@dataclass(frozen=True)
class Pieces:
    """Pieces of documents: integer arrays [n]; token counts are int32 if that is wide enough.

    Attributes:
        documents: number of the document of each piece.
        starts, stops: the piece has the tokens ``[start, stop)`` of the document.
        lengths: tokens of the whole document.
        visits: epoch in which the document was taken from the order. What is random when it is
            read depends on it, so all pieces of one visit agree and no two visits repeat.
    """

    documents: np.ndarray
    starts: np.ndarray
    stops: np.ndarray
    lengths: np.ndarray
    visits: np.ndarray

    @classmethod
    def none(cls) -> "Pieces":
        nothing = np.zeros(0, np.int64)
        return cls(nothing, nothing, nothing, nothing, nothing)

    @classmethod
    def whole(cls, documents: np.ndarray, lengths: np.ndarray, visit: int = 0) -> "Pieces":
        """Return each document as one piece, without empty documents."""
        if lengths.max(initial=0) < 1 << 31:  # saves memory with many sources
            lengths = lengths.astype(np.int32)
        visits = np.full(len(documents), visit, np.int64)
        pieces = cls(documents, np.zeros_like(lengths), lengths, lengths, visits)
        return pieces if lengths.all() else pieces[lengths > 0]

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, where: Any) -> "Pieces":
        return Pieces(*(getattr(self, field.name)[where] for field in fields(self)))

    def __add__(self, others: "Pieces") -> "Pieces":
        if not len(self):
            return others
        pairs = [(getattr(self, f.name), getattr(others, f.name)) for f in fields(self)]
        return Pieces(*map(np.concatenate, pairs))

    def ranges(self) -> list[tuple[int, int, int]]:
        """Return ``(document, start, stop)`` of each piece."""
        return list(zip(self.documents.tolist(), self.starts.tolist(), self.stops.tolist()))

    def cut(self, longest: int) -> "Pieces":
        """Cut pieces into parts of at most ``longest`` tokens that share their boundary token.

        Example:
            >>> nine = Pieces.whole(np.array([0]), np.array([9])).cut(4)
            >>> list(zip(nine.starts.tolist(), nine.stops.tolist()))
            [(0, 4), (3, 7), (6, 9)]
        """
        sizes = self.stops - self.starts
        if not len(self) or sizes.max() <= longest:
            return self
        counts = np.maximum(1, -(-(sizes - 1) // (longest - 1)))
        number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        parts = self[np.repeat(np.arange(len(self)), counts)]
        starts = (parts.starts + number * (longest - 1)).astype(sizes.dtype)
        stops = np.minimum(starts + longest, parts.stops)
        return replace(parts, starts=starts, stops=stops)

    def join(self) -> "Pieces":
        """Undo :meth:`cut`: join pieces of one visit that share their boundary token.

        Example:
            >>> nine = Pieces.whole(np.array([0]), np.array([9])).cut(4)
            >>> nine.join().ranges()
            [(0, 0, 9)]
        """
        firsts: list[int] = []
        stops: list[int] = []
        joined_to: dict[tuple[int, int, int], int] = {}  # (document, visit, stop) -> joined piece
        visits = self.visits.tolist()
        for number, (document, start, stop) in enumerate(self.ranges()):
            index = joined_to.pop((document, visits[number], start + 1), -1) if start else -1
            if index < 0:
                index = len(firsts)
                firsts.append(number)
                stops.append(stop)
            stops[index] = stop
            joined_to[document, visits[number], stop] = index
        return replace(self[np.array(firsts, np.int64)], stops=np.array(stops, self.stops.dtype))

    def join_windows(self, ends: np.ndarray) -> "Pieces":
        """Undo the cutting of a stream into windows that share their boundary token.

        Args:
            ends: where each window ends among the pieces, int64 [windows].

        Example:
            >>> nine = Pieces.whole(np.array([0]), np.array([9])).cut(4)
            >>> nine.join_windows(np.array([1, 2, 3])).ranges()
            [(0, 0, 9)]
        """
        is_first = np.ones(len(self), bool)
        is_first[ends[ends < len(self)]] = False
        firsts = np.flatnonzero(is_first)
        lasts = np.append(firsts[1:], len(self))[: len(firsts)] - 1
        return replace(self[firsts], stops=self.stops[lasts])


@dataclass(frozen=True)
class PackPlan:
    """A pack plan: rows that were packed together.

    Attributes:
        pieces: the pieces of all rows, row after row.
        ends: int64 [rows], where each row ends among the pieces.
        tokens: int64 [rows], positions without padding in each row.
        documents: int64 [rows], documents that end in each row.
        carried: pieces carried over to the next plan.
    """

    pieces: Pieces
    ends: np.ndarray
    tokens: np.ndarray
    documents: np.ndarray
    carried: Pieces

    @classmethod
    def of(
        cls, pieces: Pieces, ends: np.ndarray, documents: np.ndarray, carried: Pieces, seq_len: int
    ) -> "PackPlan":
        """Build a plan, with ``tokens`` computed from the pieces."""
        before = np.concatenate(([0], np.cumsum(pieces.stops - pieces.starts)))
        tokens = np.diff(before[ends], prepend=0)
        return cls(pieces, ends, np.minimum(tokens, seq_len), documents, carried)

    @classmethod
    def none(cls) -> "PackPlan":
        """Return a plan without rows."""
        nothing = np.zeros(0, np.int64)
        return cls(Pieces.none(), nothing, nothing, nothing, Pieces.none())

    def __add__(self, later: "PackPlan") -> "PackPlan":
        """Return the rows of this plan and of a later one, and what the later one carries over."""
        if not len(self):
            return later
        return PackPlan(
            self.pieces + later.pieces,
            np.concatenate((self.ends, len(self.pieces) + later.ends)),
            np.concatenate((self.tokens, later.tokens)),
            np.concatenate((self.documents, later.documents)),
            later.carried,
        )

    @functools.cached_property
    def totals(self) -> np.ndarray:
        """Cumulative tokens and documents before each row and of all rows, int64 [2, rows + 1]."""
        return np.cumsum([[0, *self.tokens], [0, *self.documents]], axis=1)

    @functools.cached_property
    def sizes(self) -> np.ndarray:
        """Tokens of each piece."""
        return self.pieces.stops - self.pieces.starts

    def extent(self, row: int) -> slice:
        """Return the indices of the pieces of a row."""
        return slice(int(self.ends[row - 1]) if row else 0, int(self.ends[row]))

    @functools.cached_property
    def digest(self) -> str:
        """A hash of the rows; it shows on a resume that the rebuilt plan has the same ones."""
        numbers = (self.ends, self.pieces.documents, self.pieces.starts)
        return sha256(*(each.astype(np.int64).tobytes() for each in numbers))[:16]

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.ends)


def find_repeated(documents: np.ndarray) -> np.ndarray:
    """Return the numbers that occur more than once, sorted."""
    ordered = np.sort(documents)
    return ordered[1:][ordered[1:] == ordered[:-1]]
