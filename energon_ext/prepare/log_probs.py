# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The table of log-probabilities: those of the trained labels of every sample of a source.

A folder contains two files per part of the source: ``.counts.bin`` with a uint32 per sample, and
``.log_probs.bin`` with that many float32 per sample, in order. The counts are read at the start,
the log-probabilities of a sample when it is needed.
"""

from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from energon_ext.errors import ConfigError
from energon_ext.prepare.accounts import read_record
from energon_ext.prepare.cache import SPLIT
from energon_ext.prepare.lengths import damaged_error, read_column
from energon_ext.tokens.index import PREPARED

COUNTS, LOG_PROBS = ".counts.bin", ".log_probs.bin"
_CONTENT = "log-probabilities"


class LogProbWriter:
    """Writes one part of a table."""

    def __init__(self, prefix: str | Path):
        self._prefix = str(prefix)
        self._counts, self._values = array("I"), array("f")

    @property
    def num_documents(self) -> int:
        return len(self._counts)

    @property
    def num_tokens(self) -> int:
        return len(self._values)

    def write(self, log_probs: np.ndarray, weights: None, origin: str = "") -> None:
        """Append the log-probabilities of a sample, float [n]; empty for an unusable one."""
        self._counts.append(len(log_probs))
        self._values.frombytes(log_probs.astype(np.float32).tobytes())

    def abandon(self) -> None:
        """Do nothing, since no file is open."""

    def close(self, meta: Mapping[str, Any] | None = None) -> None:
        """Write the files."""
        for suffix, values in ((COUNTS, self._counts), (LOG_PROBS, self._values)):
            Path(self._prefix + suffix).write_bytes(values.tobytes())


@dataclass(frozen=True, eq=False)
class LogProbTable:
    """The log-probabilities of the samples of a source.

    Attributes:
        files: of the parts, in order.
        first_samples, first_values: number of the first sample, and of its first value, of each
            part; one more at the end.
        ends: int64 [n], where the values of each sample end among those of all parts.
    """

    files: list[Path]
    first_samples: np.ndarray
    first_values: np.ndarray
    ends: np.ndarray

    @classmethod
    def open(cls, folder: Path) -> "LogProbTable":
        """Open a table written by :mod:`~energon_ext.prepare.units`."""
        units = (read_record(folder / PREPARED) or {}).get("units")
        if not isinstance(units, list):
            raise damaged_error(folder, f"{PREPARED} cannot be read", _CONTENT)
        counts = read_column(folder, units, COUNTS, "<u4").astype(np.int64)
        names = [f"{SPLIT}/{unit['name']}" for unit in units]
        samples, values = (
            [unit["files"][name + suffix]["bytes"] // 4 for name, unit in zip(names, units)]
            for suffix in (COUNTS, LOG_PROBS)
        )
        ends = np.cumsum(counts)
        if sum(values) != (ends[-1] if len(ends) else 0):
            raise damaged_error(folder, "its counts do not match", _CONTENT)
        return cls(
            [folder / (name + LOG_PROBS) for name in names],
            np.cumsum([0, *samples]),
            np.cumsum([0, *values]),
            ends,
        )

    def __len__(self) -> int:
        return len(self.ends)

    def read(self, number: int) -> np.ndarray:
        """Read the log-probabilities of a sample: float32 [count].

        Raises:
            ConfigError: its file is missing or too short.
        """
        part = int(np.searchsorted(self.first_samples, number, side="right")) - 1
        begin = int(self.ends[number - 1]) if number else 0
        count = int(self.ends[number]) - begin
        offset = 4 * (begin - int(self.first_values[part]))
        try:
            found = np.fromfile(self.files[part], "<f4", count, offset=offset)
        except OSError as error:
            raise ConfigError(f"{self.files[part]}: {error.strerror or error}.") from error
        if len(found) < count:
            file = self.files[part]
            raise damaged_error(file.parent.parent, f"{file.name} is too short", _CONTENT)
        return found
