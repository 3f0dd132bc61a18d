# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""What is inside a dataset or a loader, below Energon's wrappers."""

from __future__ import annotations

from typing import Any, Iterator

from energon_ext.errors import ConfigError
from energon_ext.plan.dataset import BlendedDataset


def find_blend(dataset_or_loader: Any) -> BlendedDataset:
    """The blend inside a dataset or loader.

    Raises:
        ConfigError: there is none; the TaskEncoder lacks the mixin.
    """
    for blend in blends_inside(dataset_or_loader):
        return blend
    raise ConfigError(
        f"No blend of sources in {type(dataset_or_loader).__name__}; build the dataset with "
        f"energon_ext.PackedTaskEncoder, or a TaskEncoder with energon_ext.DynamicBlendMixin."
    )


def blends_inside(dataset_or_loader: Any) -> list[BlendedDataset]:
    """Every blend inside a dataset or loader."""
    return [found for found in _walk(dataset_or_loader) if isinstance(found, BlendedDataset)]


def _walk(dataset_or_loader: Any) -> Iterator[Any]:
    yield dataset_or_loader
    inner = getattr(dataset_or_loader, "datasets", None)
    if inner is None:  # a loader, or a leaf
        inner = [dataset_or_loader.dataset] if hasattr(dataset_or_loader, "dataset") else []
    for wrapped in inner:
        yield from _walk(wrapped)
