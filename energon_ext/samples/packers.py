# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Rows of whole samples, by their lengths alone."""

import copy
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from energon_ext.errors import ConfigError
from energon_ext.packing import BestFitPacker, Packer, PackPlan, Pieces


@dataclass(frozen=True)
class OnePerRow(Packer):
    """A row for every sample."""

    name = "one per row"
    cuts_documents = False

    seq_len: int = 1

    def __post_init__(self) -> None:
        """Any length will do."""

    def plan(
        self, carried: Pieces, new: Pieces, *, rows_before: int = 0, last: bool = False
    ) -> PackPlan:
        ends, documents = np.arange(1, len(new) + 1), np.ones(len(new), np.int64)
        return PackPlan.of(new, ends, documents, Pieces.none(), self.seq_len)

    def resumed(self, carried: Pieces) -> Pieces:
        return carried


@dataclass(frozen=True)
class WholePacker(BestFitPacker):
    """Best fit of samples that are never cut: T positions hold T tokens."""

    name = "whole samples"

    def _sizes(self, lengths: np.ndarray) -> tuple[np.ndarray, int]:
        return lengths, self.seq_len


class Stub:
    """A sample of which a packer knows the length."""

    def __init__(self, number: int, length: int, length_attribute: str):
        self.number = number  # its place in the buffer
        self.num_tokens = self.total_len = self.length = length  # encoders have each of these names
        setattr(self, length_attribute, length)


@dataclass(frozen=True)
class OwnPacker(Packer):
    """Packs by a user's ``select_samples_to_pack``, which sees :class:`Stub` objects.

    Samples that it leaves out are carried over to the next plan; the last ones are a row each.

    Args:
        encoder: whose method it is. Besides the samples it may depend on ``seq_len`` alone.
    """

    name = "select_samples_to_pack"
    cuts_documents = False

    encoder: Any = field(kw_only=True)

    def with_seq_len(self, seq_len: int) -> "OwnPacker":
        """The same for rows of another length."""
        encoder = copy.copy(self.encoder)
        try:
            encoder.seq_len = seq_len
        except AttributeError as error:
            raise ConfigError(
                f"{type(encoder).__qualname__}.seq_len: {error}. Rows of {seq_len} are packed once "
                f"more to go on behind them; make it an attribute that can be set."
            ) from error
        return OwnPacker(seq_len, encoder=encoder)

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name}

    def plan(
        self, carried: Pieces, new: Pieces, *, rows_before: int = 0, last: bool = False
    ) -> PackPlan:
        pieces = carried + new
        lengths = (pieces.stops - pieces.starts).tolist()
        name, select = self.encoder.length_attribute, self.encoder.select_samples_to_pack
        stubs = [Stub(number, length, name) for number, length in enumerate(lengths)]
        try:
            rows = [[stub.number for stub in row] for row in select(list(stubs)) if row]
        except AttributeError as error:
            raise ConfigError(
                f"select_samples_to_pack: {error}. It sees lengths alone, as num_tokens, "
                f"total_len and length; name another in length_attribute."
            ) from error
        if last:
            others = set(range(len(stubs))).difference(*rows)
            rows += [[number] for number in sorted(others)]
        self._check(rows, lengths)
        chosen = np.array([number for row in rows for number in row], np.int64)
        ends = np.cumsum([len(row) for row in rows], dtype=np.int64)
        left = pieces[np.delete(np.arange(len(pieces)), chosen)]
        return PackPlan.of(pieces[chosen], ends, np.diff(ends, prepend=0), left, self.seq_len)

    def _check(self, rows: list[list[int]], lengths: list[int]) -> None:
        longest = max((sum(lengths[number] for number in row) for row in rows), default=0)
        if longest > self.seq_len:
            raise ConfigError(
                f"select_samples_to_pack: a row of {longest} tokens, {self.seq_len} fit."
            )
        chosen = [number for row in rows for number in row]
        if not chosen or len(set(chosen)) < len(chosen):
            raise ConfigError(
                "select_samples_to_pack: no row, or a sample in two rows; a packer puts every "
                "sample into one row, or leaves it for the next buffer."
            )

    def resumed(self, carried: Pieces) -> Pieces:
        return carried
