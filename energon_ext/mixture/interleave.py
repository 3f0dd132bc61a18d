# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Interleaving that keeps the token shares of sources exact."""

from __future__ import annotations

import functools
from typing import Any, Sequence

from energon_ext.mixture.choice import ChoiceDataset, Source
from energon_ext.mixture.choosers import LeastConsumedChooser


class LeastConsumedDataset(ChoiceDataset):
    """Draws each sample from the source that has consumed the fewest tokens for its weight.

    Counts what samples really hold (``num_tokens`` of a row, 1 of a sample that does not say), so
    shares of tokens follow the weights to within one sample; see
    :class:`~energon_ext.mixture.choosers.LeastConsumedChooser`.

    Args:
        sources: as for :class:`~energon_ext.mixture.choice.ChoiceDataset`.
        **options: likewise.
        new_source: ``baseline`` or ``zero``, where a source starts that a resumed state does not
            know.
    """

    def __init__(self, sources: Sequence[Source], *, new_source: str = "baseline", **options: Any):
        make_chooser = functools.partial(_least_consumed_chooser, new_source=new_source)
        super().__init__(sources, make_chooser=make_chooser, **options)


def _least_consumed_chooser(keys, weights, *, seed, axis, sample_tokens, new_source):
    return LeastConsumedChooser(
        keys,
        [axis.restate(weight) for weight in weights],
        seed=seed,
        sample_tokens=sample_tokens,
        new_source=new_source,
    )
