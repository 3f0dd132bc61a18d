# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""What a preparation has written."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class SplitCounts:
    """What one split holds; ``tokens`` stays 0 in a dataset of text."""

    documents: int = 0
    characters: int = 0
    tokens: int = 0
    shards: int = 0


@dataclass(slots=True)
class Refusals:
    """Conversations that cannot be trained on.

    Attributes:
        count: how many.
        first: why the first one was refused.
        in_a_row: how many of the last ones.
    """

    count: int = 0
    first: str = ""
    in_a_row: int = 0

    def add(self, reason: str) -> None:
        self.first = self.first or reason
        self.count += 1
        self.in_a_row += 1


@dataclass(slots=True)
class DatasetCounts:
    """What was written, per split, and how many documents were too short or refused."""

    splits: dict[str, SplitCounts]
    skipped: int = 0
    refused: Refusals = field(default_factory=Refusals)
