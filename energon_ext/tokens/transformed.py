# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Documents as a transform changes them: their lengths for a plan, their columns for a reader."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from energon_ext.arguments import choices
from energon_ext.batch.columns import (
    LABEL_WEIGHTS,
    TOKENS,
    Column,
    check_values,
    foreign_id,
)
from energon_ext.errors import ConfigError, SampleError
from energon_ext.keyed import stable_hash
from energon_ext.tokens.column_folder import ColumnFolder
from energon_ext.tokens.documents import Documents, Lengths, sample_numbers
from energon_ext.tokens.transforms import DocumentColumns, DocumentTransform, Transform

#: What every document has.
_OWN = {
    TOKENS: Column(np.dtype(np.int64)),
    LABEL_WEIGHTS: Column(np.dtype(np.float32), fill=1),
}


def bind(
    transform: Transform, documents: Documents, others: Mapping[str, ColumnFolder], where: str
) -> Transform:
    """Return a transform for the documents of a source; ConfigError if they lack its columns."""

    def values(name: str, numbers: np.ndarray) -> np.ndarray:
        return look_up(documents, others, name, numbers)

    try:
        return replace(transform, change=transform.change.bind(values))
    except ConfigError as error:
        raise ConfigError(f"{where}.{transform.name}: {error}") from None


class TransformedLengths(Lengths):
    """The lengths of documents after a transform.

    Args:
        documents: before it.
        transform: bound to them.
    """

    def __init__(self, documents: Documents, transform: Transform):
        self.documents, self._transform = documents, transform

    def __len__(self) -> int:
        return len(self.documents)

    def lengths(self, numbers: np.ndarray) -> np.ndarray:
        found = self._transform.change.lengths(numbers, self.documents.lengths(numbers))
        is_integer = isinstance(found, np.ndarray) and found.dtype.kind in "iu"
        if not is_integer or found.shape != numbers.shape or found.min(initial=0) < 0:
            raise ConfigError(
                f"transform {self._transform.name}: its lengths of {len(numbers)} documents are "
                f"{found!r:.80}; an array of as many integers >= 0 is needed."
            )
        return found

    @property
    def is_large(self) -> bool:
        return self.documents.is_large

    def request(self, numbers: np.ndarray) -> None:
        self.documents.request(numbers)

    def fingerprint(self) -> dict[str, Any]:
        looked_up = self._transform.change.fingerprint(sample_numbers(len(self)))
        described = {**self._transform.to_json(), **looked_up}
        return {**self.documents.fingerprint(), "transform": described}


@dataclass(frozen=True)
class Changes:
    """Changes documents for a reader.

    Attributes:
        transform: bound to the documents.
        key: seed of the run and key of the order of the source.
        token_id: returns the id of a token, given by its name.
        vocab_size: ids are below it.
    """

    transform: Transform
    key: str
    token_id: Callable[[str], int]
    vocab_size: int

    @functools.cached_property
    def _change(self) -> DocumentTransform:
        return self.transform.change.resolve(self.token_id)

    def read(
        self,
        documents: Documents,
        others: Mapping[str, ColumnFolder],
        pieces: tuple[Sequence[int], Sequence[int], Sequence[int]],
        visits: Sequence[int],
    ) -> dict[str, list[Any]]:
        """Return the columns of pieces of changed documents, as :func:`read_columns` does.

        Raises:
            SampleError: the transform returns columns of other names or lengths.
        """
        wanted = list(dict.fromkeys(zip(pieces[0], visits)))
        numbers = [number for number, _ in wanted]
        stored = documents.lengths(np.array(numbers, np.int64))
        found = read_columns(documents, others, numbers, [0] * len(numbers), stored.tolist())
        described = columns_of(documents, others)
        planned = self._change.lengths(np.array(numbers, np.int64), stored).tolist()
        changed = {}
        for place, (number, visit) in enumerate(wanted):
            columns = DocumentColumns(
                {name: each[place] for name, each in found.items()}, described
            )
            rng = np.random.default_rng(stable_hash(f"{self.key}/{number}/{visit}"))
            result = self._change.apply(number, columns, rng)
            changed[number, visit] = self._check(number, columns, result, planned[place])
        read: dict[str, list[Any]] = {name: [] for name in found}
        for number, start, stop, visit in zip(*pieces, visits):
            for name, values in changed[number, visit].items():
                is_cut = values is not None and self._is_per_token(name, described)
                read[name].append(values[start:stop] if is_cut else values)
        return read

    @staticmethod
    def _is_per_token(name: str, described: Mapping[str, Column]) -> bool:
        return name in (TOKENS, LABEL_WEIGHTS) or described[name].per == "token"

    def _check(
        self, number: int, before: DocumentColumns, after: Mapping[str, Any], planned: int
    ) -> Mapping[str, Any]:
        """Return what a transform returned; a column per document may be left out."""
        where = f"transform {self.transform.name}: document {number}"
        per_document = {
            name: before[name] for name in before if not self._is_per_token(name, before.described)
        }
        found = {**per_document, **after} if isinstance(after, Mapping) else {}
        if found.keys() != before.keys():
            names = sorted(map(str, found)) if found else type(after).__name__
            raise SampleError(f"{where} became {names}; the columns {sorted(before)} are needed.")
        described = {**_OWN, **before.described}
        origin = f"{where} became other values than planned"
        for name, values in found.items():
            is_known = values is before[name] or _has_type(values, described[name], planned)
            if values is not None and not is_known:
                found[name] = check_values(name, described[name], values, planned, origin)
        tokens = np.asarray(found[TOKENS])
        if len(tokens) != planned:
            raise SampleError(f"{origin}: {len(tokens)} tokens found, {planned} are needed.")
        if (token := foreign_id(tokens, self.vocab_size)) is not None:
            raise SampleError(
                f"{where} has the token {token} after it, but the tokenizer has "
                f"{self.vocab_size} ids."
            )
        return found


def _has_type(values: Any, column: Column, tokens: int) -> bool:
    """Return True for an array of the shape and the type that a column has."""
    counts = (tokens,) if column.per == "token" else ()
    return (
        type(values) is np.ndarray
        and values.dtype == column.dtype
        and values.shape == (*counts, *column.item)
    )


def columns_of(documents: Documents, others: Mapping[str, ColumnFolder]) -> dict[str, Column]:
    """Return the columns of documents, and those of others."""
    return {**documents.columns, **{name: each.columns[name] for name, each in others.items()}}


def read_columns(
    documents: Documents,
    others: Mapping[str, ColumnFolder],
    numbers: Sequence[int],
    starts: Sequence[int],
    stops: Sequence[int],
) -> dict[str, list[Any]]:
    """Return all columns of some pieces, as :meth:`~Documents.read` does."""
    found = documents.read(numbers, starts, stops)
    if not others:
        return found
    for folder in {id(each): each for each in others.values()}.values():
        folder.check_tokens(documents, numbers)
    for name, folder in others.items():
        found[name] = folder.read(name, numbers, starts, stops)
    return found


def look_up(
    documents: Documents, others: Mapping[str, ColumnFolder], name: str, numbers: np.ndarray
) -> np.ndarray:
    """Return a column per document of some documents, [n, *item]; ConfigError if there is none."""
    columns = columns_of(documents, others)
    per_document = [each for each, column in columns.items() if column.per == "document"]
    if name not in per_document:
        has = choices(name, per_document)
        raise ConfigError(f"the documents have no column per document {name!r}; they have {has}")
    column = columns[name]
    wanted, nothing = numbers.tolist(), [0] * len(numbers)
    if name in others:
        values = others[name].read(name, wanted, nothing, nothing)
    else:
        values = documents.read(wanted, nothing, nothing, (name,))[name]
    found = column.filled(len(wanted))
    for place, each in enumerate(values):
        if each is not None:
            found[place] = each
    return found
