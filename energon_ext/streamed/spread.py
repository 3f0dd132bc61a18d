# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Spreads the samples of streamed sources over the workers of all ranks.

Energon gives each worker a part of every source. The parts are equal, except that some workers get
one sample more, or the only one if a source has fewer samples than there are workers. Those workers
follow each other, and the first may be chosen. If it were chosen for each source alone, small
sources would meet at some workers and leave others without a sample. So the sources of a run form a
line: each begins at the worker after the last one of the source before it.

A state refers to samples by their number in a worker's part. So the place of each source is saved
with its state, and a resume keeps it; sources that are new to the run are added at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from megatron.energon.flavors.webdataset.sample_loader import WebdatasetSampleLoaderDataset

from energon_ext.state.schema import COUNT

#: The shape of :meth:`Spread.to_json`; None for other datasets.
SPREAD = (None, {"first": COUNT, "samples": COUNT})

#: The slices of a source for each worker of a rank, as Energon's loader has them.
Slices = Sequence[Sequence[int]]


class Spread:
    """The place of a source in the line of all samples of a run.

    Args:
        loader: Energon's loader of the samples.
        slices_from: returns the slices if the source begins at a worker.
        samples: number of samples of the source.
        first: number of samples before it in the line.
    """

    def __init__(
        self,
        loader: WebdatasetSampleLoaderDataset,
        slices_from: Callable[[int], Slices],
        samples: int,
        first: int,
    ):
        self._loader, self._slices_from = loader, slices_from
        self.samples, self.first = samples, first
        self._as_built = first

    def place(self, first: int | None) -> None:
        """Move the source behind a number of samples; None for its place when it was built."""
        first = self._as_built if first is None else first
        if first != self.first:
            self._loader.workers_slice_offsets = self._slices_from(first)
            self._loader.slice_offsets = None  # Energon's copy for the current worker
            self.first = first

    def to_json(self) -> dict[str, int]:
        return {"first": self.first, "samples": self.samples}


def line_up(
    sources: Iterable[Any], saved: Mapping[str, Mapping[str, int] | None] | None = None
) -> None:
    """Give each source its place in the line: the one in a state, or else one at the end.

    New sources are in the order of their names, which do not change if all data moves.

    Args:
        saved: :meth:`Spread.to_json` of each source in a state, by its current key if it has one;
            sources that have left the run keep their place. None without a state.
    """
    saved = saved or {}
    ordered = sorted(sources, key=lambda source: (source.names.shuffle_key, source.key))
    spreads = {source.key: source.spread for source in ordered if source.spread is not None}
    for key, before in saved.items():
        if key in spreads:
            spreads[key].place(before and before["first"])
    left = [before["first"] + before["samples"] for before in saved.values() if before]
    kept = [spread.first + spread.samples for key, spread in spreads.items() if key in saved]
    end = max([0, *left, *kept])
    for key, spread in spreads.items():
        if key not in saved:
            spread.place(end)
            end += spread.samples
