# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Orders of the documents of an epoch that are not random: as stored, or by a value of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from energon_ext.arguments import check_integer, check_kind, choices
from energon_ext.errors import ConfigError, StateFormatError
from energon_ext.keyed import KeyedPermutation, sha256

RANDOM, STORED = "random", "stored"

#: The value of a document that is always there: its tokens.
LENGTH = "length"

_FIELDS = ("by", "descending", "buckets")


@dataclass(frozen=True)
class Arrangement:
    """How the documents of an epoch follow one another.

    Attributes:
        by: column per document by whose values they are sorted, or ``length``; None as stored.
        descending: from the largest value to the smallest.
        buckets: number of equal parts of the sorted documents, each of which is read in random
            order, a new one in each epoch; None to sort all of them.
        digest: of the sorted numbers of a saved epoch; empty before they are sorted.
        is_random: whether an entry asks for a random order, in place of one further outside.
    """

    by: str | None = None
    descending: bool = False
    buckets: int | None = None
    digest: str = ""
    is_random: bool = False

    def to_json(self) -> Any:
        """Return the value of an entry's ``order``, with the digest if it has one."""
        if self.by is None:
            return STORED
        found = {"by": self.by, "descending": self.descending, "buckets": self.buckets}
        return {**found, "digest": self.digest} if self.digest else found

    @property
    def plain(self) -> Arrangement:
        """The arrangement without its digest."""
        return replace(self, digest="")


def order_from_config(value: Any, where: str) -> Arrangement:
    """Return the arrangement that an entry's ``order`` describes.

    Raises:
        ConfigError: it describes none.

    Example:
        >>> order_from_config({"by": "level", "buckets": 10}, "order")
        Arrangement(by='level', descending=False, buckets=10, digest='', is_random=False)
    """
    if value == RANDOM:
        return Arrangement(is_random=True)
    if value == STORED:
        return Arrangement()
    if not isinstance(value, Mapping) or not isinstance(value.get("by"), str):
        raise ConfigError(
            f"{where}: {value!r:.80} found; {RANDOM}, {STORED}, or the column to sort by, such as "
            f"{{by: level}}, is needed."
        )
    for name in value:
        if name not in _FIELDS:
            raise ConfigError(f"{where}: no field {name!r:.80}; it has {choices(name, _FIELDS)}")
    descending, buckets = value.get("descending", False), value.get("buckets")
    check_kind(f"{where}.descending", descending, bool)
    if buckets is not None:
        check_integer(f"{where}.buckets", buckets, 1)
    return Arrangement(value["by"], descending, buckets)


def arrangement_from_state(value: Any) -> Arrangement | None:
    """Return the arrangement of a saved epoch; StateFormatError if it is none."""
    if value is None or value == STORED:
        return None if value is None else Arrangement()
    digest = value["digest"]
    try:
        found = order_from_config({name: value[name] for name in _FIELDS}, "order")
    except ConfigError as error:
        raise StateFormatError(f"The state has no order of an epoch: {error}") from None
    return replace(found, digest=digest)


def sort_numbers(values: np.ndarray, descending: bool) -> np.ndarray:
    """Return the numbers of documents by their values; equal ones in the order of their numbers.

    Example:
        >>> sort_numbers(np.array([3, 1, 3, 2]), descending=True).tolist()
        [0, 2, 3, 1]
    """
    if not descending:
        return np.argsort(values, kind="stable")
    return len(values) - 1 - np.argsort(values[::-1], kind="stable")[::-1]


def digest_of_numbers(numbers: np.ndarray) -> str:
    """Return a digest that reveals another order."""
    return sha256(numbers.astype("<u4" if len(numbers) < 1 << 32 else "<u8").tobytes())[:16]


def mix_in_buckets(places: np.ndarray, size: int, buckets: int, key: str) -> np.ndarray:
    """Return places of which those in one of the equal parts of ``size`` are permuted."""
    mixed = places.copy()
    buckets = min(buckets, size)
    bounds = np.arange(buckets + 1) * size // buckets
    found = np.searchsorted(bounds, places, side="right") - 1
    for bucket in np.unique(found).tolist():
        where = found == bucket
        first, stop = int(bounds[bucket]), int(bounds[bucket + 1])
        permute = KeyedPermutation(stop - first, f"{key}/bucket {bucket}")
        mixed[where] = permute(places[where] - first) + first
    return mixed
