# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Packers that build rows of whole samples from their lengths."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from energon_ext.errors import ConfigError
from energon_ext.packing import BestFitPacker, Packer, PackPlan, Pieces, build_packer
from energon_ext.tokens.documents import Lengths


@dataclass(frozen=True)
class OnePerRow(Packer):
    """One row per sample."""

    name = "one per row"
    cuts_documents = False

    seq_len: int = 1

    def __post_init__(self) -> None:
        """Accept any length."""

    def plan(
        self, carried: Pieces, new: Pieces, *, rows_before: int = 0, last: bool = False
    ) -> PackPlan:
        ends, documents = np.arange(1, len(new) + 1), np.ones(len(new), np.int64)
        return PackPlan.of(new, ends, documents, Pieces.none(), self.seq_len)


@dataclass(frozen=True)
class WholePacker(BestFitPacker):
    """Best fit of samples that are never cut: T positions fit T tokens."""

    name = "whole samples"

    def _sizes(self, lengths: np.ndarray) -> tuple[np.ndarray, int]:
        return lengths, self.seq_len


class Stub:
    """Stand-in for a sample, with only its length, as attributes and as items of a dictionary."""

    def __init__(self, number: int, length: int, length_attribute: str):
        self.number = number  # index in the buffer
        self.num_tokens = self.total_len = self.length = length  # names that encoders commonly use
        setattr(self, length_attribute, length)

    def __getitem__(self, name: str) -> int:
        if name not in vars(self):
            raise AttributeError(f"a sample has no item {name!r}")
        return int(vars(self)[name])


class SelectsSamples(Protocol):
    """An encoder that packs samples in its own way."""

    seq_len: int
    length_attribute: str

    def select_samples_to_pack(self, samples: list[Any]) -> list[list[Any]]:
        """Divide samples into rows."""


@dataclass(frozen=True)
class OwnPacker(Packer):
    """Packs with a user's ``select_samples_to_pack``, which receives :class:`Stub` objects.

    Unselected samples are carried over to the next plan; in the last one, each becomes a row.

    Args:
        encoder: has the method, which may depend only on the samples and ``seq_len``.
    """

    name = "select_samples_to_pack"
    cuts_documents = False

    encoder: SelectsSamples = field(kw_only=True)

    def with_seq_len(self, seq_len: int) -> "OwnPacker":
        """Return this packer for rows of another length."""
        encoder = copy.copy(self.encoder)
        try:
            encoder.seq_len = seq_len
        except AttributeError as error:
            raise ConfigError(
                f"{type(encoder).__qualname__}.seq_len: {error}. To continue, rows of {seq_len} "
                f"must be packed again; make it a writable attribute."
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
                f"select_samples_to_pack: {error}. Samples only have their length, as num_tokens, "
                f"total_len and length; set length_attribute to use another name."
            ) from error
        if last:
            unselected = set(range(len(stubs))).difference(*rows)
            rows += [[number] for number in sorted(unselected)]
        self._check(rows, lengths)
        chosen = np.array([number for row in rows for number in row], np.int64)
        ends = np.cumsum([len(row) for row in rows], dtype=np.int64)
        left = pieces[np.delete(np.arange(len(pieces)), chosen)]
        return PackPlan.of(pieces[chosen], ends, np.diff(ends, prepend=0), left, self.seq_len)

    def _check(self, rows: list[list[int]], lengths: list[int]) -> None:
        longest = max((sum(lengths[number] for number in row) for row in rows), default=0)
        if longest > self.seq_len:
            raise ConfigError(
                f"select_samples_to_pack: a row has {longest} tokens, at most {self.seq_len} fit."
            )
        chosen = [number for row in rows for number in row]
        if len(set(chosen)) < len(chosen):
            raise ConfigError(
                "select_samples_to_pack: a sample is in two rows; put each sample in one row or "
                "leave it for the next buffer."
            )
        if not chosen and sum(lengths) >= 2 * self.seq_len:
            raise ConfigError(
                f"select_samples_to_pack: no row is made of {len(lengths)} samples with "
                f"{sum(lengths)} tokens, {self.seq_len} of which fit in a row; return some rows, "
                f"so that the samples left for the next buffer do not pile up."
            )


def rebuild_packer(
    packer: Mapping[str, Any],
    row_tokens: int,
    current: Packer,
    *,
    lengths: Lengths,
    numbers: range,
    excluded: np.ndarray | None,
    key: str,
) -> Packer:
    """Rebuild the packer of earlier rows of samples.

    Args:
        packer, row_tokens: its JSON, and the positions of its rows.
        current: packer of later rows.
        lengths, numbers: those of the samples that the source ``key`` reads, except the excluded.

    Raises:
        ConfigError: the packer no longer exists, or samples that it packed do not fit later rows.
    """
    read = np.arange(numbers.start, numbers.stop)
    read = read if excluded is None else np.setdiff1d(read, excluded)
    _check_fit(row_tokens, current.seq_len, lengths, read, key)
    if (whole := load_whole_packer(packer, row_tokens)) is not None:
        return whole
    if isinstance(current, OwnPacker):
        return current.with_seq_len(row_tokens)
    raise ConfigError(
        f"{key}: earlier rows were packed by select_samples_to_pack, which this encoder lacks; "
        f"keep the method, or start a new run."
    )


def load_whole_packer(packer: Mapping[str, Any], row_tokens: int) -> Packer | None:
    """Build a :class:`WholePacker` from its JSON; None for the JSON of another packer."""
    options = dict(packer)
    is_whole = options.pop("name", None) == WholePacker.name
    return build_packer(WholePacker, row_tokens, options) if is_whole else None


def _check_fit(before: int, now: int, lengths: Lengths, numbers: np.ndarray, key: str) -> None:
    """Raise ConfigError if rows are now too short for samples that were read before."""
    read = lengths.for_rows(before).lengths(numbers)
    too_long = read > now
    if too_long.any():
        raise ConfigError(
            f"{key}: {too_long.sum():,} samples have more than the {now} tokens of a row, but were "
            f"read in rows of {before} before; use a `seq_len` of at least {read.max()}, or "
            f"`exclude` them."
        )
