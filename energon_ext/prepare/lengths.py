# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The table of lengths: tokens and cost of every sample of a source, eight bytes per sample.

A folder contains two files per part of the source, such as a shard: ``.lengths.bin`` with a uint32
and ``.costs.bin`` with a float32 per sample, in order.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from energon_ext.batch.columns import NO_COLUMNS
from energon_ext.data_files import read_data
from energon_ext.errors import ConfigError
from energon_ext.keyed import sha256, stable_hash
from energon_ext.prepare.accounts import read_record
from energon_ext.prepare.cache import SPLIT
from energon_ext.prepare.job import Record
from energon_ext.tokens.documents import Lengths
from energon_ext.tokens.index import PREPARED

LENGTHS, COSTS = ".lengths.bin", ".costs.bin"


class LengthWriter:
    """Writes one part of a table."""

    def __init__(self, prefix: str | Path):
        self._prefix = str(prefix)
        self._lengths, self._costs = array("I"), array("f")
        self.num_tokens = 0

    @property
    def num_documents(self) -> int:
        return len(self._lengths)

    def write(
        self,
        lengths: np.ndarray,
        costs: np.ndarray | None,
        columns: Mapping[str, Any] = NO_COLUMNS,
        *,
        origin: str = "",
    ) -> None:
        """Append a sample: its length and its cost, each as an array of one number; empty for 0."""
        length = int(lengths.sum())
        self._lengths.append(length)
        self._costs.append(0.0 if costs is None else float(costs.sum()))
        self.num_tokens += length

    def abandon(self) -> None:
        """Do nothing, since no file is open."""

    def close(self, meta: Mapping[str, Any] | None = None) -> None:
        """Write the files."""
        for suffix, values in ((LENGTHS, self._lengths), (COSTS, self._costs)):
            Path(self._prefix + suffix).write_bytes(values.tobytes())


@dataclass(frozen=True, eq=False)
class LengthTable(Lengths):
    """The lengths of the samples of a source.

    Attributes:
        measured: uint32 [n]; 0 for a sample that could not be measured.
        measured_costs: float32 [n], added to the cost of the tokens, in the unit of encoder.cost.
        longest: positions of a row; longer samples count as empty and are in no row.
    """

    measured: np.ndarray
    measured_costs: np.ndarray
    longest: int

    @classmethod
    def open(cls, folder: Path, longest: int) -> "LengthTable":
        """Read a table written by :mod:`~energon_ext.prepare.units`."""
        units = (read_record(folder / PREPARED) or {}).get("units")
        if not isinstance(units, list):
            raise damaged_error(folder, f"{PREPARED} cannot be read")
        lengths, costs = (
            read_column(folder, units, suffix, dtype)
            for suffix, dtype in ((LENGTHS, "<u4"), (COSTS, "<f4"))
        )
        return cls(lengths, costs, longest)

    def __len__(self) -> int:
        return len(self.measured)

    @property
    def num_too_long(self) -> int:
        """Number of samples that are longer than a row."""
        return int((self.measured > self.longest).sum())

    @property
    def samples_per_row(self) -> float:
        """Approximate number of samples per row."""
        fitting = self.measured[(self.measured > 0) & (self.measured <= self.longest)]
        return self.longest / float(fitting.mean()) if len(fitting) else 1

    def for_rows(self, longest: int) -> "LengthTable":
        """Return this table for rows of another length."""
        return replace(self, longest=longest)

    def lengths(self, numbers: np.ndarray) -> np.ndarray:
        lengths = self.measured[numbers].astype(np.int64)
        return np.where(lengths <= self.longest, lengths, 0)

    def costs(self, numbers: np.ndarray) -> np.ndarray:
        """Return the cost of each sample in addition to its tokens, float32 [n]."""
        return self.measured_costs[numbers]

    def fingerprint(self) -> dict[str, Any]:
        """Return the number of samples and tokens, and a digest of all lengths."""
        tokens = int(self.measured.sum(dtype=np.int64))
        return {"documents": len(self), "tokens": tokens, "lengths": _digest(self.measured)}

    def options(self) -> dict[str, Any]:
        """Return a digest of all costs, which decide how the rows of a step go to the ranks."""
        return {"costs": _digest(self.measured_costs)}


def _digest(column: np.ndarray) -> str:
    return f"{stable_hash(column.tobytes().hex()):016x}"


def read_column(
    folder: Path, units: Sequence[Record], suffix: str, dtype: str, table: str = "lengths"
) -> np.ndarray:
    """Concatenate the numbers in the files of all units with a suffix.

    Raises:
        ConfigError: a file is missing, or differs from its hash.
    """
    parts = [np.zeros(0, dtype)]
    for unit in units:
        file = f"{SPLIT}/{unit['name']}{suffix}"
        expected = unit["files"].get(file, {"bytes": 0, "sha256": sha256()})
        try:
            content = read_data(folder / file, expected["bytes"])
        except (OSError, ConfigError) as error:
            raise damaged_error(folder, str(error), table) from error
        if sha256(content) != expected["sha256"]:
            raise damaged_error(folder, f"{file} has changed since it was written", table)
        parts.append(np.frombuffer(content, dtype))
    return np.concatenate(parts)


def damaged_error(folder: Path, reason: str, content: str = "lengths") -> ConfigError:
    """Return the error of a table whose files do not match."""
    return ConfigError(f"{folder}: the table of {content} is damaged ({reason}).")
