# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Arguments that are refused before the first prompt, and not by the first failure."""

from __future__ import annotations

import math
from typing import Any

from energon_ext.errors import ConfigError


def check_integers(owner: str, least: int = 1, **values: Any) -> None:
    """Raise ConfigError unless each value is an integer >= ``least``.

    Example:
        >>> check_integers("RLDataset", rows=2.5)
        Traceback (most recent call last):
        energon_ext.errors.ConfigError: RLDataset: rows is 2.5, an integer >= 1 is needed.
    """
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigError(f"{owner}: {name} is {value!r}, an integer >= {least} is needed.")


def check_numbers(owner: str, *, most: float = math.inf, zero: bool = False, **values: Any) -> None:
    """Raise ConfigError unless each value is a finite number above 0, or 0 where that is allowed.

    Example:
        >>> check_numbers("Sampling", most=1, top_p=1.5)
        Traceback (most recent call last):
        energon_ext.errors.ConfigError: Sampling: top_p is 1.5, a number > 0 and <= 1 is needed.
    """
    for name, value in values.items():
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        least = number and (value > 0 or zero and value == 0)
        if not least or value > most or value == math.inf:
            needed = f"a {'finite ' if most == math.inf else ''}number {'>=' if zero else '>'} 0"
            needed += "" if most == math.inf else f" and <= {most:g}"
            raise ConfigError(f"{owner}: {name} is {value!r}, {needed} is needed.")
