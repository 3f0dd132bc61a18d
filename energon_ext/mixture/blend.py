# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Random blending by weights that may change from batch to batch."""

from __future__ import annotations

from typing import Any, Sequence

from energon_ext.mixture.choice import ChoiceDataset, Source
from energon_ext.mixture.choosers import RandomChooser


class DynamicBlendDataset(ChoiceDataset):
    """Draws each sample from a random source, by the weights of the batch being assembled.

    The probability of a source is its weight at the per-rank batch index, divided by the weights of
    all sources that have samples for this worker. A weight of 0 is never drawn.

    Args:
        sources: as for :class:`~energon_ext.mixture.choice.ChoiceDataset`.
        **options: likewise.
    """

    def __init__(self, sources: Sequence[Source], **options: Any):
        super().__init__(sources, make_chooser=_random_chooser, **options)


def _random_chooser(keys, weights, *, seed, axis, sample_tokens):
    return RandomChooser(keys, [axis.restate(weight) for weight in weights], seed=seed)
