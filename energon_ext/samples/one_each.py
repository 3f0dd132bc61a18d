# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Lengths of samples that are not packed."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from energon_ext.tokens.documents import Lengths


@dataclass(frozen=True)
class OneEach(Lengths):
    """Samples that each become one row and count as one token."""

    count: int
    version: dict[str, Any]  # fingerprint of the data

    def __len__(self) -> int:
        return self.count

    def lengths(self, numbers: np.ndarray) -> np.ndarray:
        return np.ones(len(numbers), np.int64)

    def tokens_in(self, first: int, stop: int) -> int:
        return stop - first

    def fingerprint(self) -> dict[str, Any]:
        return self.version
