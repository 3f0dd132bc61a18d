# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The number of batches in a pass, counted by drawing a fork of the plan."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from energon_ext.errors import ConfigError

if TYPE_CHECKING:
    from energon_ext.plan.dataset import PlannedDataset


def batches_in_pass(dataset: "PlannedDataset") -> int | None:
    """Return the batches per rank of a pass; None if it is endless.

    Takes as long as planning the rest of the pass, unless that is endless.
    """
    most = dataset.passes.batches
    if not dataset.plan.is_finite:
        return most or None
    fork, topology = dataset.fork(), dataset.topology
    numbers = itertools.count(fork.plan.step)
    steps = sum(not dataset.clock.is_skipped(n) for n, _ in zip(numbers, fork.draw_steps()))
    rounds = steps * topology.rounds - dataset.progress.done // topology.rows_per_round
    batches = dataset.batches_read + rounds
    return min(batches, most) if most else batches


def check_all_rows_are_read(dataset: "PlannedDataset", encoder: str) -> None:
    """Raise ConfigError if the last rows of a pass do not fill a step, and nothing completes it.

    Args:
        encoder: name of the TaskEncoder.
    """
    fork, topology = dataset.fork(), dataset.topology
    steps = sum(1 for _ in itertools.islice(fork.draw_steps(), dataset.passes.batches or None))
    if not fork.dropped_rows:
        return
    rows = steps * topology.rows_per_step + fork.dropped_rows
    other = f"pass limit={steps} to leave them out" if steps else "use smaller batches"
    raise ConfigError(
        f"{', '.join(dataset.keys)}: {rows:,} rows in batches of {topology.batch_rows} on "
        f"{topology.ranks} rank(s) leave {fork.dropped_rows} over. Give {encoder} a method "
        f"make_padding(row), whose rows complete the last batches and count as nothing, or {other}."
    )
