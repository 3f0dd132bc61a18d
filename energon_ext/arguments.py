# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Early checks of arguments, fields and optional packages, before a run can fail on them."""

from __future__ import annotations

import difflib
import importlib
import math
from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any

from energon_ext.errors import ConfigError

_KINDS = {bool: "true or false", str: "text"}


def check_kind(where: str, value: Any, kind: type) -> None:
    """Raise ConfigError unless a value is of ``kind``, which is bool or str."""
    if not isinstance(value, kind):
        raise ConfigError(f"{where}: {value!r:.80} found, {_KINDS[kind]} is needed.")


def check_choice(where: str, value: Any, allowed: Iterable[str]) -> None:
    """Raise ConfigError unless a value is one of those allowed."""
    if value not in (names := tuple(allowed)):
        raise ConfigError(f"{where}: {value!r:.80} found, one of {', '.join(names)} is needed.")


def check_integer(where: str, value: Any, least: int) -> None:
    """Raise ConfigError unless a value is an integer >= ``least`` that fits into int64."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise ConfigError(f"{where}: {value!r} found, an integer >= {least} is needed.")
    if int(value) >= 2**63:
        raise ConfigError(f"{where}: a number >= 2^63 found, an integer below it is needed.")


def check_number(
    where: str, value: Any, most: float = math.inf, *, above_zero: bool = False
) -> None:
    """Raise ConfigError unless a value is finite, >= 0 (> 0 if ``above_zero``) and <= ``most``.

    Example:
        >>> check_number("Sampling.top_p", 1.5, most=1, above_zero=True)
        Traceback (most recent call last):
        energon_ext.errors.ConfigError: Sampling.top_p: 1.5 found, a number > 0 and <= 1 is needed.
    """
    is_number = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or not 0 <= value <= most or (above_zero and value == 0):
        needed = f"a {'finite ' if most == math.inf else ''}number {'>' if above_zero else '>='} 0"
        needed += "" if most == math.inf else f" and <= {most:g}"
        raise ConfigError(f"{where}: {value!r} found, {needed} is needed.")


def choices(found: Any, allowed: Iterable[str], most: int = 30) -> str:
    """List the allowed values and any close match, as the end of a message.

    Example:
        >>> choices("wieght", ["path", "weight"])
        'path, weight; did you mean weight?'
    """
    names = sorted(allowed)
    near = difflib.get_close_matches(str(found)[:100], names[:1000])
    text = ", ".join(names[:most]) + (", ..." if len(names) > most else "") or "none"
    return f"{text}; did you mean {' or '.join(near)}?" if near else f"{text}."


def optional_module(module: str, who: str, package: str, install: str) -> Any:
    """Import a module of an optional package; ConfigError with the install command if missing."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        advice = f"pip install '{install}'"
        raise ConfigError(f"{who} needs the package `{package}`: {advice}.") from error


def check_integers(owner: str, least: int = 1, **values: Any) -> None:
    """Raise ConfigError unless each argument of ``owner`` is an integer >= ``least``.

    Example:
        >>> check_integers("RLDataset", rows=2.5)
        Traceback (most recent call last):
        energon_ext.errors.ConfigError: RLDataset.rows: 2.5 found, an integer >= 1 is needed.
    """
    for name, value in values.items():
        check_integer(f"{owner}.{name}", value, least)
