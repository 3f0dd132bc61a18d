# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The contents of the rows of a step and the ranks that read them, without reading tokens."""

from dataclasses import dataclass
from typing import Any, Iterator, Sequence

from energon_ext.plan.run import Run
from energon_ext.plan.step import Step
from energon_ext.plan.topology import Topology


@dataclass(frozen=True)
class TracedRow:
    """One row of a step, in a layout the pieces of it that one micro-batch has.

    Attributes:
        row: its number in the step.
        rank, micro_batch: the data-parallel rank that reads it, and in which micro-batch; in a
            layout the first rank.
        source: key of its source; None for padding, which completes a step.
        contents: ``(document, start, stop)`` of every piece in it, in order.
        context_size: in a layout, how many ranks from ``rank`` on share the micro-batch.
    """

    row: int
    rank: int
    micro_batch: int
    source: str | None
    contents: list[tuple[int, int, int]]
    context_size: int | None = None

    @property
    def ranks(self) -> range:
        """The ranks that read it."""
        return range(self.rank, self.rank + (self.context_size or 1))

    def to_json(self) -> dict[str, Any]:
        fields = dict(vars(self))
        if self.context_size is None:
            del fields["context_size"]
        return fields


def trace_step(step: Step, run: Run) -> Iterator[TracedRow]:
    """Yield the rows of a step of a run, in order."""
    if run.options.contexts is not None:
        return iter(_rows_of_layout(step, run))
    return rows_of(step, step.topology, run.keys)


def rows_of(step: Step, topology: Topology, keys: Sequence[str]) -> Iterator[TracedRow]:
    """Yield the rows of a step in order; ``keys`` are the keys of all sources."""
    for number in range(topology.places):
        round_, place = divmod(number, topology.rows_per_round)
        source, contents = None, []
        if (row := step.row(number)) is not None:
            taken, index, source_number = row
            source, contents = keys[source_number], taken.contents(index)
        yield TracedRow(number, place // topology.batch_rows, round_, source, contents)


def _rows_of_layout(step: Step, run: Run) -> list[TracedRow]:
    """Return the pieces of each row and micro-batch, by row."""
    found: list[TracedRow] = []
    begun = [0] * run.topology.ranks
    for each in run.lay_out(step).micro_batches:
        number = begun[each.ranks.start]
        for rank in each.ranks:
            begun[rank] += 1
        pieces: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
        for source, taken, places, rows in step.contents_of_units(each.units):
            for row, (index, piece) in zip(rows, places):
                pieces.setdefault((row, source), []).append(taken.contents(index)[piece])
        found += [
            TracedRow(row, each.ranks.start, number, run.keys[source], contents, each.size)
            for (row, source), contents in pieces.items()
        ]
    return sorted(found, key=lambda row: (row.row, row.micro_batch, row.rank))
