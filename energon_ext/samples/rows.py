# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Rows of whole samples, planned by number and encoded by the user's encoder in the reader.

A sample is never cut. It is encoded with its own random numbers, which depend on the run's seed,
the source, its number and the epoch, so a row is the same on any rank and worker.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from energon_ext.batch.rows import Row
from energon_ext.errors import ConfigError
from energon_ext.packing import Packer
from energon_ext.plan.rows import PlannedRows
from energon_ext.plan.taken_rows import Description, TakenRows
from energon_ext.samples.packers import OnePerRow, OwnPacker, WholePacker
from energon_ext.samples.reader import SampleReader
from energon_ext.tokens.base import Documents


@dataclass(frozen=True)
class OneEach:
    """Lengths of samples that each become one row and count as one token."""

    count: int
    version: dict[str, Any]  # fingerprint of the data
    samples_per_row = 1

    def __len__(self) -> int:
        return self.count

    def locate(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the numbers themselves, and 1 for each."""
        return numbers, np.ones(len(numbers), np.int64)

    def tokens_in(self, first: int, stop: int) -> int:
        return stop - first

    def costs_of(self, numbers: np.ndarray) -> np.ndarray:
        return np.zeros(len(numbers))

    def options(self) -> dict[str, Any]:
        return {}

    def fingerprint(self) -> dict[str, Any]:
        return self.version


class SampleRows(PlannedRows):
    """Rows of samples.

    Args:
        lengths: lengths of the samples: :class:`OneEach`, or a table of lengths.
    """

    kind = "samples"

    def __init__(self, lengths: Any, read_row: SampleReader, **options: Any):
        self._lengths, self._read_row = lengths, read_row
        super().__init__(lengths, **options)
        self.read_bytes = math.ceil(read_row.samples.stored_bytes() * lengths.samples_per_row)

    def options(self) -> dict[str, Any]:
        return {**super().options(), **self._lengths.options()}

    def _taken(self) -> TakenRows:
        return TakenSamples(self._lengths)

    @property
    def may_be_repacked(self) -> bool:
        return not isinstance(self._packer, OnePerRow)

    def former_packer(self, packing: Mapping[str, Any]) -> Packer:
        self._check_fit(packing["seq_len"])
        options = dict(packing["packing"])
        if options.pop("name") == WholePacker.name:
            return WholePacker(packing["seq_len"], **options)
        if isinstance(self._packer, OwnPacker):
            return self._packer.with_seq_len(packing["seq_len"])
        raise ConfigError(
            f"{self.key}: earlier rows were packed by select_samples_to_pack, which this encoder "
            f"lacks; keep the method, or start a new run."
        )

    def _check_fit(self, before: int) -> None:
        """Raise ConfigError if rows are now too short for samples that were read before."""
        lengths = self._lengths.for_rows(before).locate(self.kept_numbers)[1]
        too_long = lengths > self._packer.seq_len
        if too_long.any():
            raise ConfigError(
                f"{self.key}: {too_long.sum():,} samples have more than the {self._packer.seq_len} "
                f"tokens of a row, but were read in rows of {before} before; use a `seq_len` of at "
                f"least {lengths.max()}, or `exclude` them."
            )

    def _documents_of(self, packer: Packer) -> Any:
        same = packer.seq_len == self._packer.seq_len
        return self._lengths if same else self._lengths.for_rows(packer.seq_len)

    def place_of(self, number: int) -> tuple[str, str]:
        """Return the shard and the key of a sample."""
        first, *_ = [*self.stored(number), {}]
        return str(first.get("__shard__", "")), str(first.get("__key__", "excluded by the split"))

    def stored(self, number: int) -> Sequence[Mapping[str, Any]]:
        """Return the files of a sample by extension, per dataset of a join; empty if excluded."""
        return self._read_row.stored(number)

    def prefetch(self, description: tuple[list[int], int]) -> None:  # type: ignore[override]
        self._read_row.prefetch(description[0])

    def read(self, description: tuple[list[int], int]) -> Any:  # type: ignore[override]
        """Read and encode a row."""
        return self._read_row(*description)


class TokenRows(PlannedRows):
    """Rows of token files mixed with rows of samples; ``pack_tokens`` gives them the same type."""

    def __init__(self, documents: Documents, pack_tokens: Callable[[Row], Any], **options: Any):
        super().__init__(documents, **options)
        self._pack_tokens = pack_tokens

    def read(self, description: Description) -> Any:
        return self._pack_tokens(super().read(description))

    def former_packer(self, packing: Mapping[str, Any]) -> Packer:
        return replace(self._packer, seq_len=packing["seq_len"])


class TakenSamples(TakenRows):
    """Rows of samples, not yet read."""

    def __init__(self, lengths: Any):
        super().__init__()
        self._lengths = lengths

    def further_costs(self) -> np.ndarray:
        costs = [self._lengths.costs_of(self._numbers(row)).sum() for row in range(len(self))]
        return np.array(costs, np.float64)

    def _numbers(self, number: int) -> np.ndarray:
        plan, row, _ = self._rows[number]
        return plan.pieces.places[plan.extent(row)]

    def description(self, number: int) -> tuple[list[int], int]:  # type: ignore[override]
        """Return the numbers of a row's samples, and their epoch."""
        return self._numbers(number).tolist(), self._rows[number][2]
