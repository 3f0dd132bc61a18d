# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""How far a long piece of work is: a bar on a terminal, a line now and then in a log."""

import sys
import time
from typing import Any

from tqdm import tqdm

_SECONDS_BETWEEN_LINES = 30.0


class Progress:
    """Counts bytes towards a total.

    Args:
        what: is done, for people.
        total: bytes in all, 0 where that is not known.
    """

    def __init__(self, what: str, total: int):
        self._what, self._total, self._count = what, total, 0
        self._next_line = time.monotonic() + _SECONDS_BETWEEN_LINES
        self._bar: Any = None
        if sys.stderr is not None and sys.stderr.isatty():
            self._bar = tqdm(desc=what, total=total or None, unit="B", unit_scale=True)

    def add(self, count: int) -> None:
        """Count on."""
        self._count += count
        if self._bar is not None:
            self._bar.update(count)
        elif time.monotonic() >= self._next_line and sys.stderr is not None:
            self._next_line = time.monotonic() + _SECONDS_BETWEEN_LINES
            of = f" of {self._total:,} ({self._count / self._total:.0%})" if self._total else ""
            line = f"{self._what}: {self._count:,}{of} bytes"
            print(line, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Leave the bar as it is."""
        if self._bar is not None:
            self._bar.close()
