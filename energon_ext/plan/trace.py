# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The contents of the rows of a step and the ranks that read them, without reading tokens."""

from dataclasses import dataclass
from typing import Any, Iterator, Sequence

from energon_ext.plan.step import Step
from energon_ext.plan.topology import Topology


@dataclass(frozen=True)
class TracedRow:
    """One row of a step.

    Attributes:
        row: its number in the step.
        rank, micro_batch: the data-parallel rank that reads it, and in which micro-batch.
        source: key of its source; None for padding, which completes a step.
        contents: ``(document, start, stop)`` of every piece in it, in order.
    """

    row: int
    rank: int
    micro_batch: int
    source: str | None
    contents: list[tuple[int, int, int]]

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))


def rows_of(step: Step, topology: Topology, keys: Sequence[str]) -> Iterator[TracedRow]:
    """Yield the rows of a step in order; ``keys`` are the keys of all sources."""
    for number in range(topology.places):
        round_, place = divmod(number, topology.rows_per_round)
        source, contents = None, []
        if (row := step.row(number)) is not None:
            taken, index, source_number = row
            source, contents = keys[source_number], taken.contents(index)
        yield TracedRow(number, place // topology.batch_rows, round_, source, contents)
