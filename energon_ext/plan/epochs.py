# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""How often a source has been read, if its epochs differ in size."""

from __future__ import annotations

from typing import NamedTuple


class EpochCount(NamedTuple):
    """The epochs of a source at some point of a run.

    Attributes:
        end: epochs that have been read when the current one has.
        left, size: tokens of the current epoch that have not been drawn yet, and all of them.

    Example:
        >>> count = EpochCount(end=3, left=50, size=100)
        >>> [count.after(tokens, later_size=1000) for tokens in (0, 50, 550)]
        [2.5, 3.0, 3.5]
    """

    end: int
    left: int
    size: int

    def after(self, tokens: float, later_size: float) -> float:
        """Return the epochs read after further tokens; later epochs have another size."""
        if tokens < self.left:
            return max(0.0, self.end - (self.left - tokens) / max(1, self.size))
        return self.end + (tokens - self.left) / max(1.0, later_size)
