# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""How many examples of an epoch each document gets."""

import math
from typing import Sequence

import numpy as np

from energon_ext.arguments import check_integer, check_number
from energon_ext.documents.permutation import keyed_draws
from energon_ext.errors import ConfigError
from energon_ext.splice.config import CHOICES
from energon_ext.splice.starts import scattered_steps


def document_quotas(
    doc_lengths: Sequence[int] | np.ndarray,
    epoch_length: int,
    balance_mode: str = "by_coverage",
    balance_tau: float = 1.0,
    doc_weights: Sequence[float] | np.ndarray | None = None,
) -> np.ndarray:
    """Divide an epoch among documents in proportion to length^tau, times their weights.

    Largest remainders, ties to the lower index. Weights are taken as the binary fractions that the
    floats are, and all arithmetic is in integers: the quotas are the same everywhere, and always
    sum to the epoch.

    Args:
        doc_lengths: tokens of each document, >= 1.
        epoch_length: examples in the epoch, >= 0.
        balance_mode: ``by_coverage`` (tau 1), ``by_document`` (tau 0) or ``by_temperature``.
        balance_tau: for ``by_temperature``.
        doc_weights: factor of each document, >= 0; None for 1.

    Returns:
        int64 [documents].

    Raises:
        ConfigError: an unknown mode, no document, a tau outside 0 .. 1, weights that are negative,
            not finite, all 0 or not one per document.

    Example:
        >>> document_quotas([10_000, 5_000, 2_000], 17).tolist()
        [10, 5, 2]
        >>> document_quotas([10_000, 5_000, 2_000], 17, "by_document").tolist()
        [6, 6, 5]
    """
    check_integer("epoch_length", epoch_length, 0)
    lengths = np.asarray(doc_lengths)
    if lengths.dtype.kind not in "iu" and lengths.size:
        raise ConfigError(f"doc_lengths: {lengths.dtype} found, integers are needed.")
    lengths = lengths.tolist()
    allowed = CHOICES["balance_mode"]
    if balance_mode not in allowed:
        raise ConfigError(
            f"balance_mode: {balance_mode!r} found, one of {', '.join(allowed)} is allowed."
        )
    if not lengths or min(lengths) < 1:
        raise ConfigError(
            f"document_quotas: {len(lengths)} documents, the shortest of "
            f"{min(lengths, default=0)} tokens; at least one document and >= 1 token each are "
            f"needed."
        )
    check_number("balance_tau", balance_tau, most=1.0)
    shares = _shares(lengths, balance_mode, balance_tau, doc_weights)
    return _largest_remainder(shares, int(epoch_length))


class TurningQuotas:
    """Quotas of every epoch: those of :func:`document_quotas`, but none is 0 for ever.

    Where an epoch is too short for every document, those whose part of it is below one example
    take turns in the places that they have together, at least one. Over epochs each has them in
    proportion to its part, and each has one in any round of ``ceil(1 / part)`` epochs of the
    smallest part.

    Args: as :func:`document_quotas`.
        key: names the places where rounds begin.

    Attributes:
        quotas: float64 [documents], examples in an epoch on average.
        take_turns: whether quotas differ from epoch to epoch.

    Example:
        >>> turning = TurningQuotas([70, 10, 10, 10], 8, key="")
        >>> turning.take_turns, turning.of(3).tolist()
        (False, [5, 1, 1, 1])
        >>> turning = TurningQuotas([40, 10, 10, 10], 4, key="")
        >>> turning.take_turns, [turning.of(epoch).tolist() for epoch in range(2)]
        (True, [[2, 1, 1, 0], [2, 0, 1, 1]])
    """

    def __init__(
        self,
        doc_lengths: Sequence[int] | np.ndarray,
        epoch_length: int,
        balance_mode: str = "by_coverage",
        balance_tau: float = 1.0,
        doc_weights: Sequence[float] | np.ndarray | None = None,
        *,
        key: str,
    ):
        fields = (balance_mode, balance_tau, doc_weights)
        self._fixed = document_quotas(doc_lengths, epoch_length, *fields)
        self.quotas = self._fixed.astype(float)
        shares = _shares(np.asarray(doc_lengths).tolist(), *fields)
        total = sum(shares)
        small = [d for d, share in enumerate(shares) if 0 < share * epoch_length < total]
        self._small = np.array(small, np.int64)
        self.take_turns = bool((self._fixed[self._small] == 0).any())
        if not self.take_turns:
            return
        places = int(self._fixed[self._small].sum())
        if places == 0:
            self._fixed[self._fixed.argmax()] -= 1
            places = 1
        common = math.gcd(*(shares[d] for d in small))
        parts = [shares[d] // common for d in small]
        # In units of which so many are one example.
        self._one = sum(parts)
        if places * self._one < 2**61:
            units = np.array(parts, np.int64) * places
        else:
            self._one = 2**40
            units = _largest_remainder(parts, places << 40)
        self._ends = units.cumsum()
        self._begins = self._ends - units
        self._rounds = min(-(-self._one // max(1, int(units.min()))), 2**31)
        self._step = int(scattered_steps(np.array([self._rounds]))[0])
        self._key = key
        self.quotas = self._fixed.astype(float)
        self.quotas[self._small] = units / self._one

    def of(self, epoch: int) -> np.ndarray:
        """The quotas of an epoch, int64 [documents]."""
        if not self.take_turns:
            return self._fixed
        turn, place = divmod(epoch, self._rounds)
        drawn = int(keyed_draws(np.array([turn]), np.array([2**31]), self._key)[0])
        begin = drawn * self._one >> 31
        moved = (begin + place * self._step % self._rounds * self._one // self._rounds) % self._one
        quotas = self._fixed.copy()
        # A document has an example for each multiple of one between its ends.
        quotas[self._small] = (self._ends + moved) // self._one - (
            self._begins + moved
        ) // self._one
        return quotas


def _shares(
    lengths: Sequence[int],
    balance_mode: str,
    balance_tau: float,
    doc_weights: Sequence[float] | np.ndarray | None,
) -> list[int]:
    """Integers in the proportion of the parts of an epoch."""
    shares = list(lengths)
    if balance_mode == "by_document" or balance_tau == 0 and balance_mode == "by_temperature":
        shares = [1] * len(lengths)
    elif balance_mode == "by_temperature" and balance_tau != 1:
        shares = _as_integers([float(length) ** balance_tau for length in lengths])
    if doc_weights is not None:
        for index, weight in enumerate(doc_weights):
            check_number(f"doc_weights[{index}]", float(weight))
        if len(doc_weights) != len(lengths) or not any(doc_weights):
            raise ConfigError(
                f"doc_weights: {len(doc_weights)} found for {len(lengths)} documents; one for "
                f"each is needed, and not all 0."
            )
        shares = [share * w for share, w in zip(shares, _as_integers(doc_weights))]
    return shares


def _as_integers(values: Sequence[float] | np.ndarray) -> list[int]:
    """Floats times one common power of two."""
    ratios = [float(value).as_integer_ratio() for value in values]
    common = max(denominator for _, denominator in ratios)
    return [numerator * (common // denominator) for numerator, denominator in ratios]


def _largest_remainder(shares: Sequence[int], epoch_length: int) -> np.ndarray:
    total = sum(shares)
    divided = [divmod(share * epoch_length, total) for share in shares]
    quotas = np.array([whole for whole, _ in divided], np.int64)
    missing = epoch_length - int(quotas.sum())
    # Python sorts stably, so equal remainders stay in the order of the documents.
    order = sorted(range(len(shares)), key=lambda index: -divided[index][1])
    quotas[order[:missing]] += 1
    return quotas
