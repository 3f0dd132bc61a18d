# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Random blending by weights that may change from batch to batch."""

from __future__ import annotations

from typing import Any, Mapping, Sequence

from megatron.energon import WorkerConfig

from energon_ext.choice import ChoiceDataset, Source
from energon_ext.choosers import RandomChooser


class DynamicBlendDataset(ChoiceDataset):
    """Draws each sample from a random source, by the weights of the batch being assembled.

    The probability of a source is its weight at the per-rank batch index, divided by the weights of
    all sources that have samples for this worker. A weight of 0 is never drawn.

    Args:
        sources, worker_config, fingerprint: as for :class:`~energon_ext.choice.ChoiceDataset`.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        *,
        worker_config: WorkerConfig,
        fingerprint: Mapping[str, Any] | None = None,
    ):
        super().__init__(
            sources,
            make_chooser=RandomChooser,
            worker_config=worker_config,
            fingerprint=fingerprint,
        )
