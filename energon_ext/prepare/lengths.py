# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The table of lengths: the columns ``lengths`` and ``costs`` of the samples of a source.

A folder contains a file of each column per part of the source, such as a shard, in order.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from energon_ext.batch.columns import Column
from energon_ext.errors import ConfigError
from energon_ext.keyed import stable_hash
from energon_ext.prepare.accounts import changed_files, read_record
from energon_ext.prepare.cache import SPLIT
from energon_ext.prepare.job import Record
from energon_ext.tokens.column_files import open_column
from energon_ext.tokens.documents import Lengths
from energon_ext.tokens.index import PREPARED

LENGTHS, COSTS = "lengths", "costs"

#: Of each sample; 0 for one that could not be measured.
COLUMNS = {
    LENGTHS: Column(np.dtype(np.uint32), per="document"),
    COSTS: Column(np.dtype(np.float32), per="document"),
}


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
        """Read a table written by :mod:`~energon_ext.prepare.units`.

        Raises:
            ConfigError: a file is missing, or differs from its hash.
        """
        prepared = read_record(folder / PREPARED) or {}
        if not isinstance(prepared.get("units"), list):
            raise _damaged(folder, f"{PREPARED} cannot be read")
        if changed := changed_files(folder, prepared):
            raise _damaged(folder, f"{changed[0]} has changed since it was written")
        lengths, costs = (_read(folder, prepared, name) for name in COLUMNS)
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


def _read(folder: Path, prepared: Record, name: str) -> np.ndarray:
    parts = [COLUMNS[name].filled(0)]
    for unit in prepared["units"]:
        for file in unit["files"]:
            if file.endswith(f".{name}.npy"):
                count = unit["documents"][SPLIT]
                parts.append(np.asarray(open_column(str(folder / file), COLUMNS[name], count)))
    return np.concatenate(parts)


def _damaged(folder: Path, reason: str) -> ConfigError:
    return ConfigError(f"{folder}: the table of lengths is damaged ({reason}).")
