# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Fields of a metadataset that apply to the whole run."""

import re
from dataclasses import dataclass, replace
from typing import Any, Iterable, Mapping, NamedTuple

import numpy as np
from megatron.energon.epathlib import EPath

from energon_ext.arguments import check_choice
from energon_ext.errors import ConfigError
from energon_ext.plan.row_schedule import RowSchedule, row_schedule_from_config
from energon_ext.weights.axis import STEPS, UNITS, count_from

#: Maximum lines of a file of excluded documents, and maximum characters per line.
MAX_EXCLUDED, LONGEST_LINE = 10_000_000, 4096

#: Maximum number of skipped steps, each of which is still planned.
MAX_SKIPPED = 100_000

_EXCLUDED = re.compile(r"(.+):([0-9]{1,18})")


class SkippedSteps(NamedTuple):
    """Steps ``[first, stop)`` not to read, sorted and disjoint, and the metadataset with them."""

    ranges: tuple[tuple[int, int], ...] = ()
    where: str = ""


class Exclusions(NamedTuple):
    """Excluded documents.

    Attributes:
        documents: their numbers, sorted, int64 [n], by key or name of a source.
        where: the metadataset that excludes them.
    """

    documents: Mapping[str, np.ndarray] = {}
    where: str = ""

    def documents_of(self, key: str, name: str | None) -> np.ndarray | None:
        """Return the numbers of the documents of a source, sorted, int64 [n]; None for none."""
        names = {key, name or key}
        listed = [self.documents[each] for each in names if each in self.documents]
        return np.unique(np.concatenate(listed)) if listed else None


@dataclass(frozen=True, eq=False)
class RunFields:
    """Run-wide fields of a metadataset and of the metadatasets nested in it."""

    given_axis: str | None = None  # unit of breakpoints given in the file, if any
    where: str = ""  # the file; empty if no metadataset is ours
    skip: SkippedSteps = SkippedSteps()
    exclude: Exclusions = Exclusions()
    rows: RowSchedule | None = None

    @property
    def axis(self) -> str:
        """The unit of breakpoints."""
        return self.given_axis or STEPS

    def merge(self, others: Iterable["RunFields"], *, inside: bool) -> "RunFields":
        """Return these fields merged with the fields of other metadatasets of the run.

        Metadatasets ``inside`` this one inherit its axis unless they give their own.

        Raises:
            ConfigError: two files have different axes, or both skip or both exclude.
        """
        merged = self
        for other in others:
            if other.axis != self.axis and (other.given_axis or not inside):
                found = f"{self.where} counts {self.axis}, but {other.where} counts {other.axis}"
                raise ConfigError(f"{found}; give both the same `schedule_axis`.")
            for name, shown in (("skip", "skip"), ("exclude", "exclude"), ("rows", "row_tokens")):
                ours, theirs = getattr(merged, name), getattr(other, name)
                if ours and theirs and ours.where and theirs.where and ours.where != theirs.where:
                    both = " and ".join(sorted((ours.where, theirs.where)))
                    raise ConfigError(f"{both}: `{shown}` in both; remove it from one of them.")
                merged = replace(merged, **{name: theirs if theirs and theirs.where else ours})
        return merged


def run_fields(axis: Any, skip: Any, exclude: Any, row_tokens: Any, path: EPath) -> RunFields:
    """Read the run-wide fields of a metadataset; a missing field is None."""
    where = str(path)
    if axis is not None:
        check_choice(f"{where}: schedule_axis", axis, UNITS)
    skipped, excluded = SkippedSteps(), Exclusions()
    if skip is not None:
        skipped = SkippedSteps(_ranges(skip, f"{where}: skip"), where)
    if exclude is not None:
        if not isinstance(exclude, str):
            raise ConfigError(f"{where}: exclude: {exclude!r:.80} found, a path is needed.")
        excluded = Exclusions(_read(path.parent / exclude), where)
    rows = None
    if row_tokens is not None:
        rows = row_schedule_from_config(row_tokens, where)
    return RunFields(axis, where, skipped, excluded, rows)


def _ranges(value: Any, where: str) -> tuple[tuple[int, int], ...]:
    """Read ranges of steps, and merge those that touch or overlap."""
    merged: list[tuple[int, int]] = []
    ranges = list(map(_range, value)) if isinstance(value, list) else [None]
    if None in ranges:
        needed = "ranges of steps are needed, such as [[1000, 1010]] for ten steps from 1000"
        raise ConfigError(f"{where}: {value!r:.80} found; {needed}.")
    for first, stop in sorted(filter(None, ranges)):
        if merged and first <= merged[-1][1]:
            first, stop = merged[-1][0], max(merged.pop()[1], stop)
        merged.append((first, stop))
    if sum(stop - first for first, stop in merged) > MAX_SKIPPED:
        found = f"more than {MAX_SKIPPED:,} steps in all; skipped steps are still planned"
        raise ConfigError(f"{where}: {found}. Start a new run with a `subset` instead.")
    return tuple(merged)


def _range(value: Any) -> tuple[int, int] | None:
    """Read two steps, written like breakpoints; return None for anything else."""
    match list(map(count_from, value)) if isinstance(value, list) else []:
        case [int(first), int(stop)] if 0 <= first < stop < 1 << 62:
            return first, stop
    return None


def _read(path: EPath) -> dict[str, np.ndarray]:
    """Read the excluded documents by source, from a file with one ``SOURCE:NUMBER`` per line."""
    if not path.is_file():
        raise ConfigError(f"{path}: does not exist; check the `exclude` of the metadataset.")
    numbers: dict[str, list[int]] = {}
    with path.open("rb") as file:
        for line, data in enumerate(iter(lambda: file.readline(LONGEST_LINE), b""), 1):
            text = data.decode("utf-8", "replace").strip()
            if not text or text.startswith("#"):
                continue
            match = _EXCLUDED.fullmatch(text)
            if match is None or line > MAX_EXCLUDED:
                allowed = f"SOURCE:NUMBER is needed, in at most {MAX_EXCLUDED:,} lines"
                raise ConfigError(f"{path}: line {line}: {text!r:.80} found, {allowed}.")
            numbers.setdefault(match[1], []).append(int(match[2]))
    return {source: np.unique(np.array(n, np.int64)) for source, n in numbers.items()}
