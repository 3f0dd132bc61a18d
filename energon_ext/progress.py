# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The progress bars of long work, on standard error."""

import sys
from collections.abc import Iterable
from typing import Any

from tqdm import tqdm

_SECONDS_BETWEEN_LINES = 30.0

#: Work that takes no longer shows no passing bar.
_QUIET_SECONDS = 2.0


def progress_bar(title: str, num_bytes: int | None) -> Any:
    """Return a bar of bytes, which prints a line every 30 s if it is not on a terminal."""
    seconds = 0.1 if _is_terminal() else _SECONDS_BETWEEN_LINES
    return tqdm(
        desc=title,
        total=num_bytes,
        unit="B",
        unit_scale=True,
        mininterval=seconds,
        miniters=1,
        delay=seconds,
        disable=_is_closed(),
    )


def passing_bar(title: str, total: int, items: Iterable[Any] | None = None, *, unit: str) -> Any:
    """Return a bar that is shown only on a terminal, after 2 s, and removed at its end.

    Args:
        items: what to count while the bar is iterated over; None if ``update`` is called.
        unit: the name of what is counted.
    """
    return tqdm(
        items,
        title,
        total,
        unit=unit,
        unit_scale=unit == "B",
        delay=_QUIET_SECONDS,
        leave=False,
        disable=not _is_terminal(),
    )


def _is_closed() -> bool:
    return sys.stderr is None or sys.stderr.closed


def _is_terminal() -> bool:
    return not _is_closed() and sys.stderr.isatty()
