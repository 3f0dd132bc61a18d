# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Fields of a metadataset that hold for the whole run."""

from dataclasses import dataclass, replace
from typing import Any, Iterable, Mapping, NamedTuple

import numpy as np
from megatron.energon.epathlib import EPath

from energon_ext.errors import ConfigError
from energon_ext.weights.axis import STEPS, UNITS

#: Documents that a file may exclude, and characters of one of its lines.
MOST_EXCLUDED, LONGEST_LINE = 10_000_000, 4096


class SkippedSteps(NamedTuple):
    """Steps ``[first, stop)`` that are not read, rising, apart; and the file that has them."""

    ranges: tuple[tuple[int, int], ...] = ()
    where: str = ""


class Exclusions(NamedTuple):
    """Numbers of documents that are not read, int64 [n], by source; and the file that has them."""

    documents: Mapping[str, np.ndarray] = {}
    where: str = ""


@dataclass(frozen=True)
class RunFields:
    """What a metadataset says for the whole run, with what those inside it say.

    Attributes:
        axis: what breakpoints count.
        axis_is_given: whether the file has that field.
        where: the file; empty where none is one of ours.
    """

    axis: str = STEPS
    axis_is_given: bool = False
    where: str = ""
    skip: SkippedSteps = SkippedSteps()
    exclude: Exclusions = Exclusions()

    def merged(self, others: Iterable["RunFields"], *, inside: bool) -> "RunFields":
        """The fields together with those of other metadatasets of the run.

        Args:
            inside: they are nested in this one, and follow its axis where they have none.

        Raises:
            ConfigError: two of them skip or exclude, or have another axis.
        """
        together = self
        for each in others:
            if each.axis != self.axis and (each.axis_is_given or not inside):
                raise ConfigError(
                    f"{self.where} counts {self.axis}, and {each.where} {each.axis}; give both the "
                    f"same `schedule_axis`."
                )
            for name in ("skip", "exclude"):
                own, other = getattr(together, name), getattr(each, name)
                if own.where and other.where and own.where != other.where:
                    both = " and ".join(sorted((own.where, other.where)))
                    raise ConfigError(f"{both}: `{name}` in both; only one of them may have it.")
                together = replace(together, **{name: other if other.where else own})
        return together


def run_fields(axis: Any, skip: Any, exclude: Any, path: EPath) -> RunFields:
    """The fields as a metadataset has them; None is a field that it does not have.

    Raises:
        ConfigError: an unknown unit, steps that are no ranges, a file that is missing or has a line
            that names no document.
    """
    where = str(path)
    if axis is not None and axis not in UNITS:
        raise ConfigError(f"{where}: schedule_axis: {axis!r:.80} found, {', '.join(UNITS)} known.")
    fields = RunFields(axis or STEPS, axis is not None, where)
    if skip is not None:
        ranges = _ranges(skip, f"{where}: skip")
        fields = replace(fields, skip=SkippedSteps(ranges, where))
    if exclude is not None:
        if not isinstance(exclude, str):
            raise ConfigError(f"{where}: exclude: {exclude!r:.80} found, a path is needed.")
        fields = replace(fields, exclude=Exclusions(_read(path.parent / exclude), where))
    return fields


def _ranges(value: Any, where: str) -> tuple[tuple[int, int], ...]:
    """Ranges of steps, those that touch put together."""
    merged: list[tuple[int, int]] = []
    if not isinstance(value, list) or not all(map(_is_range, value)):
        raise ConfigError(
            f"{where}: {value!r:.80} found; ranges of steps are needed, as [[1000, 1010]] for the "
            f"ten steps from 1000 on."
        )
    for first, stop in sorted(value):
        if merged and first <= merged[-1][1]:
            first, stop = merged[-1][0], max(merged.pop()[1], stop)
        merged.append((first, stop))
    return tuple(merged)


def _is_range(value: Any) -> bool:
    is_pair = isinstance(value, list) and [type(each) for each in value] == [int, int]
    return is_pair and 0 <= value[0] < value[1] < 1 << 62


def _read(path: EPath) -> dict[str, np.ndarray]:
    """Documents by source, of a file with a line ``SOURCE:NUMBER`` for each."""
    if not path.is_file():
        raise ConfigError(f"{path}: no such file, which a metadataset names to exclude documents.")
    numbers: dict[str, list[int]] = {}
    with path.open("rb") as file:
        for line in range(1, MOST_EXCLUDED + 2):
            text = file.readline(LONGEST_LINE).decode("utf-8", "replace")
            if not text:
                break
            source, _, number = text.strip().rpartition(":")
            if text.startswith("#") or not text.strip():
                continue
            if line > MOST_EXCLUDED or not source or not _is_number(number):
                allowed = f"SOURCE:NUMBER is needed, in {MOST_EXCLUDED:,} lines at most"
                raise ConfigError(f"{path}: line {line}: {text.strip()!r:.80} found, {allowed}.")
            numbers.setdefault(source, []).append(int(number))
    return {source: np.unique(np.array(of, np.int64)) for source, of in numbers.items()}


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 19
