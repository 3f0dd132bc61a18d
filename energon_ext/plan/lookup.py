# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Find the blend inside a dataset or a loader, below Energon's wrappers."""

from __future__ import annotations

from typing import Any

from energon_ext.errors import ConfigError
from energon_ext.plan.blend import Blend

#: Attribute that marks a validation dataset as one that Energon streams.
STREAMED = "_is_streamed_validation"


def find_blend(dataset_or_loader: Any) -> Any:
    """Return the :class:`~energon_ext.plan.blend.Blend` inside a dataset or loader.

    Raises:
        ConfigError: there is none, since the TaskEncoder lacks the mixin, or since it is validation
            whose samples are streamed.
    """
    if getattr(dataset_or_loader, STREAMED, False):
        raise ConfigError(
            "Validation whose samples are streamed, for the reason in the log, has no blend; read "
            "it by megatron.energon.get_savable_loader."
        )
    candidates = [dataset_or_loader]
    while candidates:
        candidate = candidates.pop()
        for blend in (candidate, getattr(candidate, "run", None)):  # of a planned dataset
            if isinstance(blend, Blend):
                return blend
        if hasattr(candidate, "datasets"):
            candidates += candidate.datasets
        elif hasattr(candidate, "dataset"):  # a loader
            candidates.append(candidate.dataset)
    raise ConfigError(
        f"No blend of sources in {type(dataset_or_loader).__name__}; build the dataset with "
        f"energon_ext.PackedTaskEncoder, or a TaskEncoder with energon_ext.DynamicBlendMixin."
    )
