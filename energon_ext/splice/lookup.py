# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""What is inside a dataset or a loader, below Energon's wrappers."""

from __future__ import annotations

from typing import Any, Iterator

from energon_ext.errors import ConfigError
from energon_ext.mixture.choice import ChoiceDataset
from energon_ext.splice.source import SpliceSource


def find_choice(dataset_or_loader: Any) -> ChoiceDataset:
    """The choice inside a dataset or loader.

    Raises:
        ConfigError: there is none; the TaskEncoder lacks the mixin.
    """
    for choice in choices_inside(dataset_or_loader):
        return choice
    raise ConfigError(
        f"No scheduled blend in {type(dataset_or_loader).__name__}; build the dataset with "
        f"energon_ext.PackedTaskEncoder, or a TaskEncoder with energon_ext.DynamicBlendMixin."
    )


def epoch_caps(dataset_or_loader: Any) -> dict[str, int]:
    """The caps that end the whole run: those of all sources, empty where one has none."""
    for choice in choices_inside(dataset_or_loader):
        caps = choice.max_epochs
        return {} if None in caps.values() else caps
    return {}


def choices_inside(dataset_or_loader: Any) -> list[ChoiceDataset]:
    """Every choice inside a dataset or loader; none in validation."""
    return [found for found in _walk(dataset_or_loader) if isinstance(found, ChoiceDataset)]


def find_splices(dataset_or_loader: Any) -> list[SpliceSource]:
    """The spliced sources inside a dataset or loader."""
    return [found for found in _walk(dataset_or_loader) if isinstance(found, SpliceSource)]


def _walk(dataset_or_loader: Any) -> Iterator[Any]:
    yield dataset_or_loader
    inner = getattr(dataset_or_loader, "datasets", None)
    if inner is None:  # a loader, or a leaf
        inner = [dataset_or_loader.dataset] if hasattr(dataset_or_loader, "dataset") else []
    for wrapped in inner:
        yield from _walk(wrapped)
