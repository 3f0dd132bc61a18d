# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Values of single fields."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any

from energon_ext.errors import ConfigError

_KINDS = {bool: "true or false", str: "text"}


def check_kind(field: str, value: Any, kind: type) -> None:
    """Raise ConfigError unless a value is a bool or a str, as asked for."""
    if not isinstance(value, kind):
        raise ConfigError(f"{field}: {value!r} found, {_KINDS[kind]} is needed.")


def check_integer(field: str, value: Any, least: int) -> None:
    """Raise ConfigError unless a value is an integer >= ``least``."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise ConfigError(f"{field}: {value!r} found, an integer >= {least} is needed.")


def check_number(field: str, value: Any, most: float = math.inf) -> None:
    """Raise ConfigError unless a value is a finite number from 0 to ``most``."""
    if (
        isinstance(value, bool)
        or not isinstance(value, Real)
        or not math.isfinite(value)
        or not 0 <= value <= most
    ):
        allowed = "a finite number >= 0" if most == math.inf else f"a number from 0 to {most:g}"
        raise ConfigError(f"{field}: {value!r} found, {allowed} is needed.")
