# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""What a preparation has written."""

from dataclasses import dataclass


@dataclass(slots=True)
class SplitCounts:
    """What one split holds; ``tokens`` stays 0 in a dataset of text."""

    documents: int = 0
    characters: int = 0
    tokens: int = 0
    shards: int = 0


@dataclass(slots=True)
class DatasetCounts:
    """What was written, per split, and how many documents were left out as too short."""

    splits: dict[str, SplitCounts]
    skipped: int = 0
