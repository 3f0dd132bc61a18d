# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""How long a micro-batch takes on some number of context-parallel ranks, fitted to measured times.

Nothing is assumed about a network, an attention kernel or a model: for every number of ranks that a
run may use, some micro-batches of different documents are timed, and three numbers describe them:
seconds per micro-batch, per token, and per pair of tokens of a document.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from energon_ext.arguments import check_integer, check_number
from energon_ext.data_files import open_data, parse_json
from energon_ext.errors import ConfigError
from energon_ext.plan.cost import AttentionCost

#: How to get measured times, at the end of messages.
HOW_TO_MEASURE = "energon_ext.megatron.measure_context_times writes them"


class ContextCost(Protocol):
    """Time of micro-batches, in any unit, as a layout needs it."""

    def __call__(self, lengths: np.ndarray, size: int) -> np.ndarray:
        """Return what documents add to a micro-batch on ``size`` context-parallel ranks.

        Args:
            lengths: int64 [n], positions of documents that attend only to themselves.

        Returns:
            float64 [n].
        """

    def overhead(self, size: int) -> float:
        """Return the time of a micro-batch without documents."""

    def to_json(self) -> Any:
        """Return JSON values that differ if the times do."""


@dataclass(frozen=True, kw_only=True)
class ContextTime:
    """The measured time of one micro-batch, forward and backward.

    Attributes:
        context_size: context-parallel ranks that shared it.
        lengths: positions of its documents, with the padding that aligns them, each at least 1.
        seconds: of the slowest of these ranks, above 0.
    """

    context_size: int
    lengths: Sequence[int]
    seconds: float

    def __post_init__(self) -> None:
        check_integer("context_size", self.context_size, 1)
        if not isinstance(self.lengths, Sequence) or not self.lengths:
            raise ConfigError(
                f"lengths: {self.lengths!r:.80} found, a list of lengths of documents is needed."
            )
        for length in self.lengths:
            check_integer("lengths", length, 1)
        check_number("seconds", self.seconds, above_zero=True)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "lengths": [*self.lengths]}


def load_context_times(path: str | Path) -> list[ContextTime]:
    """Load measured times, one JSON object per line.

    Raises:
        ConfigError: a line is not the JSON of a :class:`ContextTime`, or the file has none.
    """
    times = []
    try:
        with open_data(path) as file:
            lines = file.read().decode("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); {HOW_TO_MEASURE}.") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            times.append(ContextTime(**parse_json(line)))
        except (TypeError, ValueError, ConfigError) as error:
            raise ConfigError(
                f"{path}, line {number}: {line!r:.80} is not a measured time ({error}); a line is "
                f'like {{"context_size": 2, "lengths": [4096, 512], "seconds": 0.31}}.'
            ) from error
    if not times:
        raise ConfigError(f"{path}: has no measured times; {HOW_TO_MEASURE}.")
    return times


@dataclass(frozen=True)
class MeasuredCost:
    """Seconds of a micro-batch on a number of ranks, a function fitted to measured times.

    A micro-batch on c ranks takes ``overhead_c + sum_i (linear_c n_i + quadratic_c n_i (n_i + 1) /
    2)`` seconds, where n_i are the lengths of its documents. The three numbers of each c are the
    non-negative ones with the smallest sum of squared relative errors over the micro-batches that
    were measured on c ranks. They are computed exactly and then rounded, so that they are the same
    on every CPU.

    Attributes:
        by_size: ``(overhead, cost of a document)`` by number of ranks.
        errors: the largest relative error of the fit by number of ranks.
        longest: the longest document that was measured, by number of ranks.

    Example:
        >>> times = [
        ...     ContextTime(context_size=1, lengths=lengths, seconds=1 + sum(lengths) / 2)
        ...     for lengths in ([2], [4], [4, 4])
        ... ]
        >>> cost = MeasuredCost.fit(times)
        >>> cost.overhead(1), cost(np.array([4, 10]), 1).tolist()
        (1.0, [2.0, 5.0])
    """

    by_size: Mapping[int, tuple[float, AttentionCost]]
    errors: Mapping[int, float]
    longest: Mapping[int, int]

    @classmethod
    def fit(cls, times: Iterable[ContextTime]) -> MeasuredCost:
        """Fit the times.

        Raises:
            ConfigError: fewer than three different micro-batches were measured on some number of
                ranks.
        """
        groups: dict[int, list[ContextTime]] = {}
        for each in times:
            groups.setdefault(each.context_size, []).append(each)
        by_size, errors, longest = {}, {}, {}
        for size, group in sorted(groups.items()):
            if len({tuple(sorted(each.lengths)) for each in group}) < 3:
                raise ConfigError(
                    f"context_size {size}: fewer than three different micro-batches were measured, "
                    f"which do not determine what a micro-batch, a token and a pair of tokens "
                    f"cost; measure short and long documents, alone and together."
                )
            overhead, linear, quadratic = _fit(group)
            by_size[size] = overhead, AttentionCost(linear, quadratic)
            longest[size] = max(max(each.lengths) for each in group)
        fitted = cls(by_size, {}, longest)
        for size, group in groups.items():
            errors[size] = max(
                abs(fitted.seconds(each.lengths, size) / each.seconds - 1) for each in group
            )
        return cls(by_size, errors, longest)

    def __call__(self, lengths: np.ndarray, size: int) -> np.ndarray:
        return self._of(size)[1](lengths)

    def overhead(self, size: int) -> float:
        return self._of(size)[0]

    def seconds(self, lengths: Sequence[int], size: int) -> float:
        """Return the seconds of one micro-batch."""
        return self.overhead(size) + float(self(np.array(lengths, np.int64), size).sum())

    def to_json(self) -> Any:
        return [
            [size, overhead, cost.linear, cost.quadratic]
            for size, (overhead, cost) in sorted(self.by_size.items())
        ]

    @classmethod
    def from_json(cls, value: Any) -> MeasuredCost:
        """Return the cost of :meth:`to_json`, without what the fit says of the measurements.

        Raises:
            ValueError: the values are none.
        """
        by_size = {}
        for size, overhead, linear, quadratic in value:
            check_integer("context_size", size, 1)
            check_number("overhead", overhead)
            by_size[size] = overhead, AttentionCost(linear, quadratic)
        return cls(by_size, {}, {})

    def _of(self, size: int) -> tuple[float, AttentionCost]:
        if size not in self.by_size:
            raise ConfigError(
                f"context size {size}: no time was measured on {size} ranks, only on "
                f"{', '.join(map(str, self.by_size))}; measure it, since nothing is assumed."
            )
        return self.by_size[size]


def _fit(times: Sequence[ContextTime]) -> tuple[float, float, float]:
    """Return the three numbers of a size: the best of the fits in which some of them are 0."""
    rows = []
    for each in times:
        pairs = sum(length * (length + 1) // 2 for length in each.lengths)
        scale = 1 / Fraction(each.seconds)
        rows.append([scale, sum(each.lengths) * scale, pairs * scale])
    found: list[tuple[Fraction, list[Fraction]]] = []
    for kept in itertools.chain.from_iterable(
        itertools.combinations(range(3), count) for count in (1, 2, 3)
    ):
        solved = _least_squares([[row[index] for index in kept] for row in rows])
        if solved is None or min(solved) < 0:
            continue
        values = [Fraction(0)] * 3
        for index, value in zip(kept, solved):
            values[index] = value
        errors = (sum(map(Fraction.__mul__, row, values), Fraction(-1)) for row in rows)
        error = sum((each * each for each in errors), Fraction(0))
        found.append((error, values))
    _, best = min(found, key=lambda each: each[0])
    overhead, linear, quadratic = (float(f"{float(value):.9e}") for value in best)
    return overhead, linear, quadratic


def _least_squares(rows: Sequence[Sequence[Fraction]]) -> list[Fraction] | None:
    """Return the x with the smallest sum of (row · x - 1)²; None if it is not determined."""
    count = len(rows[0])
    table = [
        [sum((row[i] * row[j] for row in rows), Fraction(0)) for j in range(count)]
        + [sum((row[i] for row in rows), Fraction(0))]
        for i in range(count)
    ]
    for column in range(count):
        pivot = next((i for i in range(column, count) if table[i][column]), None)
        if pivot is None:
            return None
        table[column], table[pivot] = table[pivot], table[column]
        table[column] = [value / table[column][column] for value in table[column]]
        for i in range(count):
            if i != column:
                factor = table[i][column]
                table[i] = [a - factor * b for a, b in zip(table[i], table[column])]
    return [row[count] for row in table]


def scale_of(largest: float) -> float:
    """Return the power of two by which costs become integers whose sums are exact.

    Sums of floats depend on the order of addition, which differs between CPUs; the layout of a step
    must be the same on every rank.
    """
    return 2.0 ** (40 - math.frexp(largest)[1])
