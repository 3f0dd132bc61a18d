# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Fields of a metadataset that hold for the whole run."""

from dataclasses import dataclass, field, replace
from typing import Any, Iterable, Mapping, Sequence

import numpy as np
from megatron.energon.epathlib import EPath

from energon_ext.arguments import choices
from energon_ext.errors import ConfigError
from energon_ext.weights.axis import STEPS, UNITS

#: Documents that a file may exclude, and characters of one of its lines.
MOST_EXCLUDED, LONGEST_LINE = 10_000_000, 4096


@dataclass(frozen=True)
class Exclusions:
    """Documents that are not read.

    Attributes:
        documents: source -> numbers of its documents, sorted, int64 [n].
        where: the metadataset that names their file.
    """

    documents: Mapping[str, np.ndarray] = field(default_factory=dict)
    where: str = ""

    def check_sources(self, keys: Sequence[str]) -> None:
        """Refuse excluded documents of a source that is not there."""
        for key in self.documents:
            if key not in keys:
                raise ConfigError(
                    f"{self.where}: exclude: no source {key!r}; there is {choices(key, keys)}"
                )


@dataclass(frozen=True)
class RunFields:
    """What a metadataset says for the whole run, with what those inside it say.

    Attributes:
        axis: what breakpoints count.
        axis_is_given: whether the file has the field.
        axis_where: the file that decides it; empty where no file is one of ours.
        skipped_steps: steps ``[first, stop)`` of the plan, rising, apart from each other.
        skip_where: the metadataset that skips them.
        exclusions: documents that are not read.
    """

    axis: str = STEPS
    axis_is_given: bool = False
    axis_where: str = ""
    skipped_steps: tuple[tuple[int, int], ...] = ()
    skip_where: str = ""
    exclusions: Exclusions = Exclusions()

    def around(self, inner: Iterable["RunFields"]) -> "RunFields":
        """The fields of a metadataset with those of the metadatasets inside it.

        Raises:
            ConfigError: two of them skip or exclude, or an inner one has another axis.
        """
        merged = self
        for each in inner:
            if each.axis_is_given and each.axis != self.axis:
                raise ConfigError(
                    f"{each.axis_where}: schedule_axis: {each.axis} found inside "
                    f"{self.axis_where}, where breakpoints count {self.axis}; the outermost file "
                    f"decides, so write `schedule_axis: {each.axis}` there."
                )
            merged = _with_omissions(merged, each)
        return merged


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
        fields = replace(fields, skipped_steps=ranges, skip_where=where)
    if exclude is not None:
        if not isinstance(exclude, str):
            raise ConfigError(f"{where}: exclude: {exclude!r:.80} found, a path is needed.")
        documents = _read(path.parent / exclude)
        fields = replace(fields, exclusions=Exclusions(documents, where))
    return fields


def of_siblings(fields: Sequence[RunFields]) -> RunFields:
    """The fields of metadatasets side by side in a stock one, or of none.

    Raises:
        ConfigError: two of them skip or exclude, or have another axis.
    """
    merged = fields[0] if fields else RunFields()
    for each in fields[1:]:
        if each.axis != merged.axis:
            raise ConfigError(
                f"{merged.axis_where} counts {merged.axis} and {each.axis_where} {each.axis}; give "
                f"both the same `schedule_axis`."
            )
        merged = _with_omissions(merged, each)
    return merged


def _with_omissions(merged: RunFields, other: RunFields) -> RunFields:
    """With the skipped steps and the exclusions of another metadataset."""
    excluded_in = merged.exclusions.where, other.exclusions.where
    for name, wheres in (
        ("skip", (merged.skip_where, other.skip_where)),
        ("exclude", excluded_in),
    ):
        if all(wheres) and wheres[0] != wheres[1]:
            both = " and ".join(sorted(wheres))
            raise ConfigError(f"{both}: `{name}` in both; only one of them may have it.")
    if other.skip_where:
        merged = replace(merged, skipped_steps=other.skipped_steps, skip_where=other.skip_where)
    return replace(merged, exclusions=other.exclusions) if excluded_in[1] else merged


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
