# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Where a run stands on its schedule axis."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.energon import WorkerConfig

from energon_ext.errors import ConfigError
from energon_ext.plan.deal import Topology
from energon_ext.weights import ScheduleAxis


@dataclass(frozen=True)
class Clock:
    """Positions on an axis, for a plan of all ranks and for one of a worker alone.

    Attributes:
        axis: what the breakpoints of the weights count.
        topology: rows of steps and batches.
        row_tokens: positions of a row; 0 where rows differ.
        skip: steps ``[first, stop)`` of a shared plan that no optimizer step reads.
    """

    axis: ScheduleAxis
    topology: Topology
    row_tokens: int = 0
    skip: tuple[tuple[int, int], ...] = ()

    def at(self, step: int, row: int) -> int:
        """After some steps that had some rows in all."""
        batch = row // self.topology.rows_per_round
        return self.axis.position(step, row, batch, self.row_tokens)

    def at_step(self, step: int, row: int | None = None) -> int:
        """At an optimizer step that begins with a row; by default all have as many rows as now."""
        skipped = 0
        for first, stop in self.skip:
            skipped += stop - first if step + skipped >= first else 0
        rows = self.topology.rows_per_step
        return self.at(step + skipped, (step * rows if row is None else row) + skipped * rows)

    def is_skipped(self, step: int) -> bool:
        """Whether a step of the plan is not read."""
        return any(first <= step < stop for first, stop in self.skip)

    def at_own(self, rows: int) -> int:
        """After so many rows of every worker, where each draws for itself."""
        rows *= self.topology.workers * self.topology.ranks
        return self.at(rows // self.topology.rows_per_step, rows)

    def step_now(self) -> int:
        """The step of the batch that the active worker of Energon is assembling."""
        return current_batch_index() // self.topology.rounds

    def now(self) -> int:
        """At the batch that the active worker of Energon is assembling."""
        return self.at(self.step_now(), current_batch_index() * self.topology.rows_per_round)


def current_batch_index() -> int:
    """The index of the batch that the active worker is assembling, per rank.

    Raises:
        ConfigError: no loader is iterating, so there is no such index.
    """
    active = WorkerConfig.active_worker_config
    if active is None:
        raise ConfigError(
            "A scheduled blend was iterated without a loader, so it has no batch index; wrap the "
            "dataset with energon_ext.ExactDataLoader(dataset)."
        )
    return int(active.active_worker_batch_index)
