# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Which rows of a step are whose."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.energon import WorkerConfig

from energon_ext.errors import ConfigError


@dataclass(frozen=True)
class Topology:
    """Who reads a run.

    The rows of a step go out in rounds, of one batch to each rank: rank r has the rows
    ``[r * batch_rows, (r + 1) * batch_rows)`` of a round, and the workers of a rank take turns.

    Attributes:
        rows_per_step: rows of a global batch.
        batch_rows: rows of one batch of one rank.
        ranks, rank: data-parallel ranks, and which of them this is.
        workers: worker processes of a rank; 1 where the rank itself reads.

    Raises:
        ConfigError: the rows of a step do not divide into rounds.

    Example:
        >>> topology = Topology(rows_per_step=8, batch_rows=2, ranks=2, rank=1)
        >>> topology.rounds, [list(topology.rows_of(number)) for number in range(2)]
        (2, [[2, 3], [6, 7]])
    """

    rows_per_step: int
    batch_rows: int = 1
    ranks: int = 1
    rank: int = 0
    workers: int = 1

    def __post_init__(self) -> None:
        if self.rows_per_step < 1 or self.rows_per_step % self.rows_per_round:
            raise ConfigError(
                f"rows_per_step: {self.rows_per_step} found; it must be a multiple of batch_size x "
                f"data-parallel ranks = {self.batch_rows} x {self.ranks}."
            )

    @classmethod
    def of(
        cls, worker_config: WorkerConfig, batch_rows: int | None, rows_per_step: int | None
    ) -> "Topology":
        """The topology of an Energon dataset; one round a step unless told otherwise."""
        batch_rows = batch_rows or 1
        return cls(
            rows_per_step or batch_rows * worker_config.world_size,
            batch_rows,
            worker_config.world_size,
            worker_config.rank,
            max(1, worker_config.num_workers),
        )

    @property
    def rows_per_round(self) -> int:
        """Rows that all ranks read together in one batch each."""
        return self.batch_rows * self.ranks

    @property
    def rounds(self) -> int:
        """Batches of a rank in a step."""
        return self.rows_per_step // self.rows_per_round

    @property
    def of_step(self) -> dict[str, int]:
        """What a state that was saved inside a step depends on."""
        return {
            "rows_per_step": self.rows_per_step,
            "batch_size": self.batch_rows,
            "ranks": self.ranks,
        }

    def rows_of(self, number: int) -> range:
        """Rows of this rank in a round of a step."""
        first = number * self.rows_per_round + self.rank * self.batch_rows
        return range(first, first + self.batch_rows)


#: One reader that has every row to itself, one at a time.
ALONE = Topology(rows_per_step=1)
