# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Find the blend inside a dataset or a loader, below Energon's wrappers."""

from __future__ import annotations

from typing import Any, Iterator

from energon_ext.errors import ConfigError
from energon_ext.plan.blend import Blend

#: Attribute that marks a validation dataset as one that Energon streams.
STREAMED = "_is_streamed_validation"


def stages_in(dataset_or_loader: Any) -> Iterator[Any]:
    """Yield a dataset or loader and the datasets inside, from the outermost on.

    The last one is that with no dataset or several inside, which may be sources of a blend.
    """
    stage = dataset_or_loader
    while True:
        yield stage
        inner = getattr(stage, "datasets", None)
        if inner is None:
            inner = [stage.dataset] if hasattr(stage, "dataset") else []  # of a loader
        if len(inner) != 1:
            return
        (stage,) = inner


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
    for stage in stages_in(dataset_or_loader):
        for blend in (stage, getattr(stage, "run", None)):  # of a planned dataset
            if isinstance(blend, Blend):
                return blend
    raise ConfigError(
        f"No blend of sources in {type(dataset_or_loader).__name__}; build the dataset with "
        f"energon_ext.PackedTaskEncoder, or a TaskEncoder with energon_ext.DynamicBlendMixin."
    )
