# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Contents and readers of the rows of a step, without reading a token."""

from dataclasses import dataclass
from typing import Any, Iterator, Sequence

from energon_ext.plan.deal import Topology
from energon_ext.plan.step import Step


@dataclass(frozen=True)
class TracedRow:
    """One row of a step.

    Attributes:
        row: its number in the step.
        rank, micro_batch: which data-parallel rank reads it, in which of its micro-batches.
        source: key of its source; None for padding, which completes the last step.
        contents: (document, first token, the one behind the last) of everything in it, in order.
    """

    row: int
    rank: int
    micro_batch: int
    source: str | None
    contents: list[tuple[int, int, int]]

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))


def rows_of(step: Step, topology: Topology, keys: Sequence[str]) -> Iterator[TracedRow]:
    """The rows of a step in the order of their numbers; ``keys`` are those of the sources."""
    for number in range(topology.rows_per_step):
        round_, place = divmod(number, topology.rows_per_round)
        rank = place // topology.batch_rows
        found = step.taken(number)
        if found is None:
            yield TracedRow(number, rank, round_, None, [])
        else:
            taken, own, source = found
            yield TracedRow(number, rank, round_, keys[source], taken.contents(own))
