# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Breakpoints as people write them, to integers."""

import re
from fractions import Fraction
from typing import Any, Iterable, Mapping, Sequence

from energon_ext.errors import ConfigError

MOST_BREAKPOINT = 10**36

#: How integers may be written, for messages.
EXAMPLES = "1000, 1_000, 10k, 2.5M, 40B, 1T or 1e9"

_COUNT = re.compile(r"([+-]?\d+(?:_\d+)*(?:\.\d+)?(?:[eE]\+?\d{1,3})?)([kMBT]?)", re.ASCII)
_SUFFIXES = {"": 1, "k": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_MOST_CHARACTERS = 64


def as_pairs(points: Any, where: str) -> list[tuple[Any, Any]]:
    """Breakpoints with their values, of a mapping or a list of pairs."""
    if isinstance(points, Mapping):
        return list(points.items())
    if isinstance(points, Iterable) and not isinstance(points, (str, bytes)):
        pairs = list(points)
        if all(isinstance(pair, Sequence) and len(pair) == 2 for pair in pairs):
            return [tuple(pair) for pair in pairs]
    raise ConfigError(
        f"{where}: {points!r} found, {{breakpoint: value}} or [[breakpoint, value]] is allowed."
    )


def checked_breakpoint(breakpoint: Any, where: str) -> int:
    """A breakpoint as an integer; text is what Energon's YAML loader makes of mapping keys."""
    count = count_from(breakpoint)
    if count is None or not 0 <= count <= MOST_BREAKPOINT:
        raise ConfigError(
            f"{where}: breakpoint {breakpoint!r:.80} is not an integer from 0 to "
            f"{MOST_BREAKPOINT:.0e}, as {EXAMPLES}."
        )
    return count


def count_from(value: Any) -> int | None:
    """The integer that a value gives, which may be a text as ``40B``; None where it gives none."""
    if isinstance(value, str):
        return _count(value.strip())
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    return int(value) if isinstance(value, float) and value.is_integer() else None


def _count(text: str) -> int | None:
    match = _COUNT.fullmatch(text) if len(text) <= _MOST_CHARACTERS else None
    if match is None:
        return None
    number, suffix = match.groups()
    count = Fraction(number.replace("_", "")) * _SUFFIXES[suffix]
    return int(count) if count.denominator == 1 else None
