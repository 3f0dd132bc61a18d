# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Input and output of packers: parts of documents, and rows made of them, as arrays."""

import functools
import hashlib
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Pieces:
    """Parts of documents, integers [n] each; tokens are counted in int32 where these suffice.

    Attributes:
        documents: number of each.
        places: where its tokens are, see :class:`~energon_ext.documents.base.Documents`.
        starts, stops: tokens ``[start, stop)`` of the document.
        lengths: of the whole document.
    """

    documents: np.ndarray
    places: np.ndarray
    starts: np.ndarray
    stops: np.ndarray
    lengths: np.ndarray

    @classmethod
    def none(cls) -> "Pieces":
        nothing = np.zeros(0, np.int64)
        return cls(nothing, nothing, nothing, nothing, nothing)

    @classmethod
    def whole(cls, documents: np.ndarray, places: np.ndarray, lengths: np.ndarray) -> "Pieces":
        """All tokens of documents; empty ones are left out."""
        if lengths.max(initial=0) < 1 << 31:  # a worker holds many of them for many sources
            lengths = lengths.astype(np.int32)
        pieces = cls(documents, places, np.zeros_like(lengths), lengths, lengths)
        return pieces if lengths.all() else pieces[lengths > 0]

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, where: Any) -> "Pieces":
        return Pieces(*(getattr(self, field.name)[where] for field in fields(self)))

    def __add__(self, others: "Pieces") -> "Pieces":
        if not len(self):
            return others
        names = [field.name for field in fields(self)]
        pairs = [(getattr(self, name), getattr(others, name)) for name in names]
        return Pieces(*map(np.concatenate, pairs))

    def ranges(self) -> list[tuple[int, int, int]]:
        """``(document, start, stop)`` of each."""
        return list(zip(self.documents.tolist(), self.starts.tolist(), self.stops.tolist()))

    def cut(self, longest: int) -> "Pieces":
        """Pieces of at most ``longest`` tokens that share their boundary token.

        Example:
            >>> nine = Pieces.whole(np.array([0]), np.array([0]), np.array([9])).cut(4)
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
        return Pieces(parts.documents, parts.places, starts, stops, parts.lengths)

    def joined(self) -> "Pieces":
        """Pieces that were cut out of a document, sharing their boundary token, as one.

        Example:
            >>> nine = Pieces.whole(np.array([0]), np.array([0]), np.array([9])).cut(4)
            >>> nine.joined().ranges()
            [(0, 0, 9)]
        """
        firsts: list[int] = []
        stops: list[int] = []
        open_ends: dict[tuple[int, int], list[int]] = {}  # the pieces that end there
        for number, (document, start, stop) in enumerate(self.ranges()):
            before = open_ends.get((document, start + 1))
            if before and start:  # the document may be there twice, of two epochs
                place = before.pop(0)
                stops[place] = stop
            else:
                place = len(firsts)
                firsts.append(number)
                stops.append(stop)
            open_ends.setdefault((document, stop), []).append(place)
        return replace(self[np.array(firsts, np.int64)], stops=np.array(stops, self.stops.dtype))

    def with_windows_joined(self, ends: np.ndarray) -> "Pieces":
        """The stream that windows were cut out of; each begins with the last token of another.

        Args:
            ends: of the windows among the pieces, int64 [n].

        Example:
            >>> nine = Pieces.whole(np.array([0]), np.array([0]), np.array([9])).cut(4)
            >>> nine.with_windows_joined(np.array([1, 2, 3])).ranges()
            [(0, 0, 9)]
        """
        is_first = np.ones(len(self), bool)
        is_first[ends[ends < len(self)]] = False
        firsts = np.flatnonzero(is_first)
        lasts = np.append(firsts[1:], len(self))[: len(firsts)] - 1
        return replace(self[firsts], stops=self.stops[lasts])


@dataclass(frozen=True)
class PackPlan:
    """Rows that were packed together.

    Attributes:
        pieces: of all rows, row after row.
        ends: int64 [rows], where each row ends among them.
        tokens: int64 [rows], positions of each that hold a document.
        documents: int64 [rows], documents that end in each.
        carried: pieces that were left for the next plan.
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
        """A plan whose ``tokens`` follow from the pieces."""
        before = np.concatenate(([0], np.cumsum(pieces.stops - pieces.starts)))
        tokens = np.diff(before[ends], prepend=0)
        return cls(pieces, ends, np.minimum(tokens, seq_len), documents, carried)

    @classmethod
    def none(cls) -> "PackPlan":
        """No row."""
        nothing = np.zeros(0, np.int64)
        return cls(Pieces.none(), nothing, nothing, nothing, Pieces.none())

    @functools.cached_property
    def totals(self) -> np.ndarray:
        """Tokens and documents of the rows before each row and of all rows, int64 [2, rows + 1]."""
        return np.cumsum([[0, *self.tokens], [0, *self.documents]], axis=1)

    @functools.cached_property
    def sizes(self) -> np.ndarray:
        """Tokens of each piece."""
        return self.pieces.stops - self.pieces.starts

    def extent(self, row: int) -> slice:
        """Indices of the pieces of a row."""
        return slice(int(self.ends[row - 1]) if row else 0, int(self.ends[row]))

    @functools.cached_property
    def digest(self) -> str:
        """By which a plan that is made again is known to have the same rows."""
        found = hashlib.sha256(self.ends.astype(np.int64).tobytes())
        for each in (self.pieces.documents, self.pieces.starts):
            found.update(each.astype(np.int64).tobytes())
        return found.hexdigest()[:16]

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.ends)
