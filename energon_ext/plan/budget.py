# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Nested subsets of a source: the first documents of one permutation, as many as a budget pays for.

The permutation depends on nothing but the number of documents. So every run reads the same ones
for the same budget, whatever its mix, seed, rows and cluster are, and a larger budget has all
documents of a smaller one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from energon_ext.arguments import check_integer, check_number
from energon_ext.errors import ConfigError
from energon_ext.keyed import KeyedPermutation
from energon_ext.progress import passing_bar
from energon_ext.tokens.documents import Lengths
from energon_ext.weights.axis import EXAMPLES, count_from

TOKENS, DOCUMENTS, FRACTION = UNITS = ("tokens", "documents", "fraction")

#: Documents whose lengths are looked up at once.
_CHUNK = 1 << 20

#: Positions of rows that are long enough for every document.
_LONGEST = 2**31


@dataclass(frozen=True)
class Budget:
    """How much of a source is read.

    Attributes:
        unit: ``tokens``, ``documents`` or ``fraction`` (of the documents).
        amount: the number of these.
        where: place in the YAML, for messages.
    """

    unit: str
    amount: float
    where: str = field(default="", compare=False)

    def __str__(self) -> str:
        return f"{self.where}.{self.unit}: {self.amount:,}"

    def count(self, key: str, documents: range, lengths: Lengths | None) -> int:
        """Return how many documents it pays for.

        With ``tokens``, documents are added until they have that many tokens, counted as they are
        stored, so the last one may exceed the budget.

        Args:
            key: of the source, for messages.
            documents: numbers of all its documents.
            lengths: of the documents; None if they are not known.

        Raises:
            ConfigError: the source has less, a fraction of its documents is none, or its tokens are
                not known.

        Example:
            >>> Budget("fraction", 0.1).count("web", range(70), None)
            7
        """
        total = len(documents)
        if self.unit == TOKENS:
            return self._count_tokens(key, documents, lengths)
        count = round(self.amount * total) if self.unit == FRACTION else int(self.amount)
        if count > total:
            raise self._too_large(key, f"{total:,} documents")
        if not count:
            raise ConfigError(
                f"{self.where}.fraction: {self.amount:g} of the {total:,} documents of {key} is "
                f"none; give a larger one, or the number of `documents`."
            )
        return count

    def _count_tokens(self, key: str, documents: range, lengths: Lengths | None) -> int:
        if lengths is None:
            raise ConfigError(
                f"{self.where}.tokens: the tokens of {key} are not known before they are read; "
                f"give `documents` or a `fraction`."
            )
        lengths, total = lengths.for_rows(_LONGEST), len(documents)
        begins, tokens = range(0, total, _CHUNK), 0
        for begin in passing_bar(f"subset of {key}", len(begins), begins, unit="it"):
            numbers = _permute(total, np.arange(begin, min(begin + _CHUNK, total)))
            numbers += documents.start
            if lengths.is_large:
                lengths.request(numbers)
            ends = tokens + np.cumsum(lengths.lengths(numbers))
            if ends[-1] >= self.amount:
                return begin + int(np.searchsorted(ends, self.amount)) + 1
            tokens = int(ends[-1])
        raise self._too_large(key, f"{tokens:,} tokens")

    def _too_large(self, key: str, found: str) -> ConfigError:
        return ConfigError(
            f"{self.where}.{self.unit}: {int(self.amount):,} found, but {key} has {found}; give a "
            f"smaller number, or remove it to read the whole source."
        )


def budget_from_config(given: Mapping[str, Any], where: str) -> Budget | None:
    """Return the budget among the fields of an entry's ``subset``; None without one.

    Raises:
        ConfigError: there are several, or one is not a number that fits.

    Example:
        >>> budget_from_config({"tokens": "40B"}, "subset").amount
        40000000000
    """
    units = [unit for unit in UNITS if given.get(unit) is not None]
    if not units:
        return None
    if len(units) > 1:
        raise ConfigError(f"{where}: {' and '.join(units)} found; give only one of them.")
    (unit,) = units
    value = given[unit]
    if unit == FRACTION:
        check_number(f"{where}.{unit}", value, 1, above_zero=True)
        return Budget(unit, float(value), where)
    amount = count_from(value)
    if amount is None:
        raise ConfigError(
            f"{where}.{unit}: {value!r:.80} found, an integer is needed, such as {EXAMPLES}."
        )
    check_integer(f"{where}.{unit}", amount, 1)
    return Budget(unit, amount, where)


def nested_subset(total: int, count: int) -> np.ndarray:
    """Return the numbers of the first ``count`` documents of the permutation, sorted.

    uint32 if they fit, as every planner keeps them.

    Example:
        >>> nested_subset(10, 3).tolist(), nested_subset(10, 4).tolist()
        ([3, 5, 7], [3, 5, 7, 9])
    """
    numbers = np.empty(count, np.uint32 if total <= 1 << 32 else np.int64)
    for begin in range(0, count, _CHUNK):
        stop = min(begin + _CHUNK, count)
        numbers[begin:stop] = _permute(total, np.arange(begin, stop))
    numbers.sort()
    return numbers


def _permute(total: int, places: np.ndarray) -> np.ndarray:
    return KeyedPermutation(total, "subset")(places)
