# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Documents by number: their lengths for a plan, their tokens for a reader.

A plan needs numbers only: how many documents there are, and how long each one is
(:class:`Lengths`). Only a process that reads a row needs the documents themselves
(:class:`Documents`).
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakSet

import numpy as np

from energon_ext.batch.columns import LABEL_WEIGHTS, TOKENS, Column, check_values, foreign_id
from energon_ext.errors import ConfigError
from energon_ext.keyed import KeyedPermutation, sha256

#: Numbers whose lengths are summed at once.
_CHUNK = 1 << 16

#: Documents whose length enters a fingerprint; those whose tokens do; tokens of each.
_FINGERPRINT_DOCUMENTS, FINGERPRINT_READ, _FINGERPRINT_TOKENS = 256, 64, 32

#: Tokens of a document that are checked for ids outside the vocabulary.
_CHECKED_TOKENS = 1 << 14

#: Documents whose files may be truncated while this process reads them.
watched: WeakSet["Documents"] = WeakSet()


class Lengths(ABC):
    """The length of each document or sample of a source, by number.

    A plan is a function of these numbers. Those of one source must be the same on every rank.
    """

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of documents."""

    @abstractmethod
    def lengths(self, numbers: np.ndarray) -> np.ndarray:
        """Return the tokens of each document, int64 [n]; 0 for one that is in no row."""

    @abstractmethod
    def fingerprint(self) -> dict[str, Any]:
        """Return JSON values that reveal a change of the documents without reading them all."""

    @property
    def is_large(self) -> bool:
        """True if looking lengths up may wait for a disk, so that they are requested before."""
        return False

    def request(self, numbers: np.ndarray) -> None:  # noqa: B027 - only for large ones
        """Ask the storage for the lengths of documents that will be looked up soon."""

    def costs(self, numbers: np.ndarray) -> np.ndarray:
        """Return what each document costs in addition to its tokens (images), [n]."""
        return np.zeros(len(numbers))

    def tokens_in(self, first: int, stop: int) -> int:
        """Return the number of tokens in the documents ``first`` to ``stop - 1``."""
        return sum(
            int(self.lengths(np.arange(begin, min(begin + _CHUNK, stop))).sum())
            for begin in range(first, stop, _CHUNK)
        )

    def for_rows(self, seq_len: int) -> Lengths:
        """Return these lengths as rows of another number of positions see them."""
        return self

    def options(self) -> dict[str, Any]:
        """Return settings that may change between two steps, as JSON values."""
        return {}


class FileFacts(NamedTuple):
    """A file, or a pair, and what a plan depends on in it, as text."""

    path: str
    facts: str


class Origin(NamedTuple):
    """The place that a document or sample comes from.

    Attributes:
        file: path of the file, or of the pair without suffix; empty if unknown.
        number: its number in the file.
        key: its name in the input that the file was written from; None if unknown.
    """

    file: str
    number: int
    key: str | None


class Documents(Lengths):
    """Tokenized documents by number, in any store.

    A subclass needs ``__len__``, :meth:`lengths` and :meth:`tokens`. One with further columns names
    them in :attr:`columns` and returns them from :meth:`values`.
    """

    #: Whether a request takes long, so that rows of later batches are prefetched.
    is_remote = False

    #: Paths of its files, without suffix if they are pairs.
    prefixes: Sequence[str] = ()

    @property
    def is_shuffled(self) -> bool:
        """True if they are stored in random order, so that a run may read neighbours together."""
        return False

    @abstractmethod
    def tokens(self, number: int, start: int, stop: int) -> np.ndarray:
        """Return tokens ``[start, stop)`` of a document, integers; a view if possible."""

    def label_weights(self, number: int, start: int, stop: int) -> np.ndarray | None:
        """Return the loss weight of each of these tokens as a label, float32; None if all are 1."""
        return None

    @property
    def columns(self) -> Mapping[str, Column]:
        """Its columns beside tokens and label weights, by name."""
        return {}

    def values(self, name: str, number: int, start: int, stop: int) -> np.ndarray | None:
        """Return a column's values of tokens ``[start, stop)`` of a document; None if it has none.

        ``[stop - start, *item]``; of a column per document, those of the document, ``[*item]``.
        """
        raise NotImplementedError

    def read(
        self,
        numbers: Sequence[int],
        starts: Sequence[int],
        stops: Sequence[int],
        names: Collection[str] | None = None,
    ) -> dict[str, list[Any]]:
        """Return the columns of many pieces, which are looked up together.

        Args:
            numbers, starts, stops: document, first token and end of each piece.
            names: of the columns to read; None for all.

        Returns:
            By name, an array per piece, or None where it has no values: ``tokens``,
            ``label_weights`` and the names of :attr:`columns`.
        """
        pieces = list(zip(numbers, starts, stops))
        reads: dict[str, Any] = {
            TOKENS: self.tokens,
            LABEL_WEIGHTS: self.label_weights,
            **{name: functools.partial(self._checked_values, name) for name in self.columns},
        }
        wanted = reads if names is None else names
        return {name: [reads[name](*piece) for piece in pieces] for name in wanted}

    def _checked_values(self, name: str, number: int, start: int, stop: int) -> np.ndarray | None:
        values = self.values(name, number, start, stop)
        return check_values(name, self.columns[name], values, stop - start, f"document {number}")

    def read_stretch(self, first: int, stop: int) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the tokens and the label weights of consecutive documents, as one array each."""
        numbers = np.arange(first, stop)
        pieces = numbers.tolist(), [0] * len(numbers), self.lengths(numbers).tolist()
        tokens, found = self.read(*pieces, (TOKENS, LABEL_WEIGHTS)).values()
        if all(each is None for each in found):
            return np.concatenate(tokens), None
        weights = [np.ones(len(t), np.float32) if w is None else w for t, w in zip(tokens, found)]
        return np.concatenate(tokens), np.concatenate(weights)

    def prefetch(self, numbers: Sequence[int], starts: Sequence[int], stops: Sequence[int]) -> None:
        """Ask the store for pieces that will be read soon, if it takes long."""

    def origin(self, number: int) -> Origin:
        """Return where a document comes from."""
        return Origin("", number, None)

    def describe_files(self) -> list[FileFacts]:
        """Return the files in order, with what a plan depends on; empty if they are unknown."""
        return []

    def of_field(self, name: str) -> Documents | None:
        """Return the documents in a field that the entry names; None if the store has no fields."""
        return None

    @property
    def unweighted(self) -> str | None:
        """A file without label weights; None if all have some."""
        has_weights = type(self).label_weights is not Documents.label_weights
        return None if has_weights or not len(self) else self.origin(0).file or "its store"

    def check_files(self) -> None:
        """Raise ConfigError if a file has changed since it was opened."""

    def document(self, number: int) -> np.ndarray:
        """Return the tokens of one document."""
        return self.tokens(number, 0, int(self.lengths(np.array([number]))[0]))

    def fingerprint(self) -> dict[str, Any]:
        """Return counts, a hash of some lengths, and a hash of some tokens.

        The tokens come from the middle of 64 documents, which reveals different texts of equal
        lengths, but not one changed text among thousands.
        """
        sample = sample_numbers(len(self))
        return {
            "documents": len(self),
            "index": sha256(self.lengths(sample).astype("<i8").tobytes()),
            "sample": self.digest_of_middles(sample[:FINGERPRINT_READ]),
        }

    # What the store says about how it was written ------------------------------------------

    @property
    def names_tokenizer(self) -> bool:
        """True if the store names the tokenizer that wrote it."""
        return False

    def written_with(self, field: str) -> tuple[str, Any]:
        """Return the first file that says how something was written, as (file, value)."""
        return "", None

    def check_written(self, what: str, name: str, now: Mapping[str, Any]) -> None:
        """Raise ConfigError if a file names a different tokenizer or chat template."""

    def check_tokenizer(self, name: str, fingerprint: Mapping[str, Any], vocab_size: int) -> None:
        """Raise ConfigError if ids of 64 documents are not in ``[0, vocab_size)``."""
        for number in sample_numbers(len(self))[:FINGERPRINT_READ].tolist():
            length = int(self.lengths(np.array([number]))[0])
            tokens = self.tokens(number, 0, min(length, _CHECKED_TOKENS))
            if (token := foreign_id(tokens, vocab_size)) is not None:
                file, local, _ = self.origin(number)
                where = f"document {local} of {file}" if file else f"Document {local}"
                raise ConfigError(
                    f"{where}: contains token id {token}, but the tokenizer {name} has "
                    f"{vocab_size} ids; use the tokenizer that it was written with."
                )

    def digest_of_middles(self, numbers: np.ndarray) -> str:
        """Return a hash of some tokens and label weights from the middle of each document."""
        lengths = self.lengths(numbers)
        starts = np.maximum(0, (lengths - _FINGERPRINT_TOKENS) // 2)
        stops = np.minimum(lengths, starts + _FINGERPRINT_TOKENS)
        middles = numbers.tolist(), starts.tolist(), stops.tolist()
        if self.is_remote:
            self.prefetch(*middles)
        tokens, weights = self.read(*middles, (TOKENS, LABEL_WEIGHTS)).values()
        kinds = (tokens, "<i8"), ([w for w in weights if w is not None], "<f4")
        joined = (np.concatenate([np.zeros(0, t), *parts], dtype=t) for parts, t in kinds)
        return sha256(*(each.tobytes() for each in joined))


def sample_numbers(count: int) -> np.ndarray:
    """Return the numbers of the documents that enter a fingerprint, int64 [n]."""
    if not count:
        return np.zeros(0, np.int64)
    return KeyedPermutation(count, "fingerprint")(np.arange(min(count, _FINGERPRINT_DOCUMENTS)))


def check_open_files() -> None:
    """Raise ConfigError if a file was truncated since this process opened it."""
    for documents in list(watched):
        documents.check_files()
