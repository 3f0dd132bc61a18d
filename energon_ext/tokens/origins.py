# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Origins of the documents of a token file: a text file with one line per document."""

import functools
import os
from pathlib import Path

import numpy as np

from energon_ext.storage.file_map import map_file

#: Suffix of the file next to a pair.
ORIGINS_SUFFIX = ".origins.txt"

_CHUNK = 1 << 24


class Origins:
    """Lines of an origins file by number; the file is mapped, with eight bytes kept per line."""

    def __init__(self, path: str | Path):
        self._bytes = map_file(str(path), os.path.getsize(path))
        ends = [
            np.flatnonzero(self._bytes[begin : begin + _CHUNK] == ord("\n")) + begin
            for begin in range(0, len(self._bytes), _CHUNK)
        ]
        self._bounds = np.concatenate([[-1], *ends])

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def __getitem__(self, number: int) -> str:
        begin, end = self._bounds[number : number + 2]
        return self._bytes[begin + 1 : end].tobytes().decode("utf-8", "replace")


def line_of(origin: str) -> str:
    """Format an origin as one line."""
    return " ".join(origin.splitlines()) + "\n"


@functools.lru_cache(16)
def origins_of(prefix: str) -> Origins | None:
    """Return the origins of a pair; None if it has none: Megatron's own tools do not write any."""
    path = prefix + ORIGINS_SUFFIX
    return Origins(path) if os.path.isfile(path) else None
