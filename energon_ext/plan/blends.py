# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The two ways to draw, as datasets that need no YAML."""

from __future__ import annotations

from typing import Any, Sequence

from energon_ext.errors import ConfigError
from energon_ext.mixture.tree import INTERLEAVE, NEW_SOURCES
from energon_ext.plan.dataset import BlendedDataset
from energon_ext.plan.source import Source


class DynamicBlendDataset(BlendedDataset):
    """Draws each row from a random source, by the weights of the moment.

    Args:
        sources: as for :class:`BlendedDataset`, with their weights.
        **options: likewise.
    """


class LeastConsumedDataset(BlendedDataset):
    """Draws each row from the source that is furthest behind its share of tokens.

    Rows follow the weights to within one over the whole run; see
    :class:`~energon_ext.mixture.interleave.InterleaveSampler`.

    Args:
        sources: as for :class:`BlendedDataset`; weights are target shares.
        new_source: ``baseline`` or ``zero``, where a source starts that a resumed state does not
            know.
        **options: as for :class:`BlendedDataset`.
    """

    rule = INTERLEAVE

    def __init__(
        self, sources: Sequence[Source], *, new_source: str = NEW_SOURCES[0], **options: Any
    ):
        if new_source not in NEW_SOURCES:
            raise ConfigError(f"new_source: {new_source!r} found, {' or '.join(NEW_SOURCES)}.")
        super().__init__(sources, new_source=new_source, **options)
