# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The table of log-probabilities: those of the trained labels of every sample of a source.

A folder contains two files per part of the source: ``.counts.bin`` with a uint32 per sample, and
``.log_probs.bin`` with that many float32 per sample, in order, and checksums. The counts are read
at the start, the log-probabilities of a sample when it is needed.
"""

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from energon_ext.batch.columns import NO_COLUMNS
from energon_ext.errors import ConfigError
from energon_ext.prepare.accounts import read_record
from energon_ext.prepare.cache import SPLIT
from energon_ext.prepare.lengths import damaged_error, read_column
from energon_ext.storage.checked_array import CheckedArray, CheckedWriter
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

    def write(
        self,
        log_probs: np.ndarray,
        weights: None,
        columns: Mapping[str, Any] = NO_COLUMNS,
        *,
        origin: str = "",
    ) -> None:
        """Append the log-probabilities of a sample, float [n]; empty for an unusable one."""
        self._counts.append(len(log_probs))
        self._values.frombytes(log_probs.astype(np.float32).tobytes())

    def abandon(self) -> None:
        """Do nothing, since no file is open."""

    def close(self, meta: Mapping[str, Any] | None = None) -> None:
        """Write the files."""
        Path(self._prefix + COUNTS).write_bytes(self._counts.tobytes())
        with open(self._prefix + LOG_PROBS, "wb") as file:
            writer = CheckedWriter(file)
            writer.write(np.frombuffer(self._values, np.float32))
            writer.close()


@dataclass(frozen=True, eq=False)
class LogProbTable:
    """The log-probabilities of the samples of a source.

    Attributes:
        files: of the parts, in order.
        first_samples: number of the first sample of each part; one more at the end.
        ends: int64 [n + 1], the values before each sample in all parts, and all of them.
    """

    files: list[Path]
    first_samples: np.ndarray
    ends: np.ndarray
    _opened: dict[int, CheckedArray] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def open(cls, folder: Path) -> "LogProbTable":
        """Open a table written by :mod:`~energon_ext.prepare.units`."""
        units = (read_record(folder / PREPARED) or {}).get("units")
        if not isinstance(units, list):
            raise damaged_error(folder, f"{PREPARED} cannot be read", _CONTENT)
        counts = read_column(folder, units, COUNTS, "<u4", _CONTENT).astype(np.int64)
        names = [f"{SPLIT}/{unit['name']}" for unit in units]
        samples = [unit["files"][name + COUNTS]["bytes"] // 4 for name, unit in zip(names, units)]
        files = [folder / (name + LOG_PROBS) for name in names]
        return cls(files, np.cumsum([0, *samples]), np.concatenate([[0], np.cumsum(counts)]))

    def __len__(self) -> int:
        return len(self.ends) - 1

    def read(self, number: int) -> np.ndarray:
        """Read the log-probabilities of a sample: float32 [count].

        Raises:
            ConfigError: its file is missing or damaged.
        """
        part = int(np.searchsorted(self.first_samples, number, side="right")) - 1
        first, stop = self.ends[self.first_samples[part : part + 2]]
        if part not in self._opened:
            path = str(self.files[part])
            try:
                self._opened[part] = CheckedArray(path, "<f4", int(stop - first))
            except OSError as error:
                raise ConfigError(f"{path}: {error.strerror or error}.") from error
        begin, end = self.ends[number : number + 2] - first
        values: np.ndarray = self._opened[part][begin:end]
        return values
