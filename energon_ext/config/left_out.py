# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""What a metadataset says is not read: steps of the plan, and documents of sources."""

from dataclasses import dataclass, field
from typing import Any, Mapping, Sequence

import numpy as np
from megatron.energon.epathlib import EPath

from energon_ext.arguments import choices
from energon_ext.errors import ConfigError

#: Documents that a file may exclude, and characters of one of its lines.
MOST_EXCLUDED, LONGEST_LINE = 10_000_000, 4096


@dataclass(frozen=True)
class LeftOut:
    """What is not read.

    Attributes:
        skip: steps ``[first, stop)`` of the plan, rising, apart from each other.
        excluded: source -> numbers of its documents, sorted, int64 [n].
        where: the metadataset that says so.
    """

    skip: tuple[tuple[int, int], ...] = ()
    excluded: Mapping[str, np.ndarray] = field(default_factory=dict)
    where: str = ""

    def check_sources(self, keys: Sequence[str]) -> None:
        """Refuse excluded documents of a source that is not there."""
        for key in self.excluded:
            if key not in keys:
                raise ConfigError(
                    f"{self.where}: exclude: no source {key!r}; there is {choices(key, keys)}"
                )


def left_out(skip: Any, exclude: Any, path: EPath) -> LeftOut | None:
    """Of the fields of a metadataset, None where there are none.

    Raises:
        ConfigError: steps that are no ranges, a file that is missing or has a line that names no
            document.
    """
    if skip is None and exclude is None:
        return None
    excluded = {}
    if exclude is not None:
        if not isinstance(exclude, str):
            raise ConfigError(f"{path}: exclude: {exclude!r:.80} found, a path is needed.")
        excluded = _read(path.parent / exclude)
    return LeftOut(_ranges([] if skip is None else skip, f"{path}: skip"), excluded, str(path))


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
