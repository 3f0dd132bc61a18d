# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Fields of a metadataset that hold for the whole run."""

import re
from dataclasses import dataclass, replace
from typing import Any, Iterable, Mapping, NamedTuple

import numpy as np
from megatron.energon.epathlib import EPath

from energon_ext.errors import ConfigError
from energon_ext.weights.axis import STEPS, UNITS, count_from

#: Documents that a file may exclude, and characters of one of its lines.
MOST_EXCLUDED, LONGEST_LINE = 10_000_000, 4096

#: Steps that may be skipped in all: they are planned like others.
MOST_SKIPPED = 100_000

_EXCLUDED = re.compile(r"(.+):([0-9]{1,18})")


class SkippedSteps(NamedTuple):
    """Steps ``[first, stop)`` that are not read, rising, apart; and the file that has them."""

    ranges: tuple[tuple[int, int], ...] = ()
    where: str = ""


class Exclusions(NamedTuple):
    """Numbers of documents that are not read, int64 [n], by source; and the file that has them."""

    documents: Mapping[str, np.ndarray] = {}
    where: str = ""


@dataclass(frozen=True, eq=False)
class RunFields:
    """Run-wide fields of a metadataset and of those nested in it."""

    given_axis: str | None = None  # the unit of breakpoints in the file, None if it has none
    where: str = ""  # the file; empty where none is one of ours
    skip: SkippedSteps = SkippedSteps()
    exclude: Exclusions = Exclusions()

    @property
    def axis(self) -> str:
        """The unit of breakpoints."""
        return self.given_axis or STEPS

    def merged(self, others: Iterable["RunFields"], *, inside: bool) -> "RunFields":
        """The fields together with those of other metadatasets of the run.

        Those ``inside`` this one follow its axis where they have none. ConfigError where two skip
        or exclude, or have another axis.
        """
        together = self
        for each in others:
            if each.axis != self.axis and (each.given_axis or not inside):
                found = f"{self.where} counts {self.axis}, and {each.where} {each.axis}"
                raise ConfigError(f"{found}; give both the same `schedule_axis`.")
            for name in ("skip", "exclude"):
                own, other = getattr(together, name), getattr(each, name)
                if own.where and other.where and own.where != other.where:
                    both = " and ".join(sorted((own.where, other.where)))
                    raise ConfigError(f"{both}: `{name}` in both; only one of them may have it.")
                together = replace(together, **{name: other if other.where else own})
        return together


def run_fields(axis: Any, skip: Any, exclude: Any, path: EPath) -> RunFields:
    """The fields as a metadataset has them; None is a field that it does not have."""
    where = str(path)
    if axis is not None and axis not in UNITS:
        raise ConfigError(f"{where}: schedule_axis: {axis!r:.80} found, {', '.join(UNITS)} known.")
    skipped, excluded = SkippedSteps(), Exclusions()
    if skip is not None:
        skipped = SkippedSteps(_ranges(skip, f"{where}: skip"), where)
    if exclude is not None:
        if not isinstance(exclude, str):
            raise ConfigError(f"{where}: exclude: {exclude!r:.80} found, a path is needed.")
        excluded = Exclusions(_read(path.parent / exclude), where)
    return RunFields(axis, where, skipped, excluded)


def _ranges(value: Any, where: str) -> tuple[tuple[int, int], ...]:
    """Ranges of steps, those that touch put together."""
    merged: list[tuple[int, int]] = []
    ranges = [_range(each) for each in value] if isinstance(value, list) else [None]
    if None in ranges:
        needed = "ranges of steps are needed, as [[1000, 1010]] for the ten steps from 1000 on"
        raise ConfigError(f"{where}: {value!r:.80} found; {needed}.")
    for first, stop in sorted(filter(None, ranges)):
        if merged and first <= merged[-1][1]:
            first, stop = merged[-1][0], max(merged.pop()[1], stop)
        merged.append((first, stop))
    if sum(stop - first for first, stop in merged) > MOST_SKIPPED:
        found = f"more than {MOST_SKIPPED:,} steps in all; each is planned like any other"
        raise ConfigError(f"{where}: {found}. Begin a new run with a `subset` instead.")
    return tuple(merged)


def _range(value: Any) -> tuple[int, int] | None:
    """Two steps, written as breakpoints may be; None for anything else."""
    match [count_from(each) for each in value] if isinstance(value, list) else []:
        case [int(first), int(stop)] if 0 <= first < stop < 1 << 62:
            return first, stop
    return None


def _read(path: EPath) -> dict[str, np.ndarray]:
    """Documents by source, of a file with a line ``SOURCE:NUMBER`` for each."""
    if not path.is_file():
        raise ConfigError(f"{path}: no such file, which a metadataset names to exclude documents.")
    numbers: dict[str, list[int]] = {}
    with path.open("rb") as file:
        for line, data in enumerate(iter(lambda: file.readline(LONGEST_LINE), b""), 1):
            text = data.decode("utf-8", "replace").strip()
            if not text or text.startswith("#"):
                continue
            found = _EXCLUDED.fullmatch(text)
            if found is None or line > MOST_EXCLUDED:
                allowed = f"SOURCE:NUMBER is needed, in {MOST_EXCLUDED:,} lines at most"
                raise ConfigError(f"{path}: line {line}: {text!r:.80} found, {allowed}.")
            numbers.setdefault(found[1], []).append(int(found[2]))
    return {source: np.unique(np.array(of, np.int64)) for source, of in numbers.items()}
