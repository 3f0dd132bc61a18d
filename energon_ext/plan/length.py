# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The number of batches in a pass, counted by drawing a fork of the plan."""

from __future__ import annotations

import itertools

from energon_ext.errors import ConfigError
from energon_ext.plan.run import Run


def batches_in_pass(run: Run) -> int | None:
    """Return the batches per rank of a pass; None if it is endless.

    Takes as long as planning the rest of the pass, unless that is endless.
    """
    most = run.options.pass_batches
    if not run.plan.is_finite:
        return most or None
    fork, topology = run.fork(), run.topology
    numbers = itertools.count(fork.plan.step)
    steps = sum(not run.clock.is_skipped(n) for n, _ in zip(numbers, fork.draw_steps()))
    rounds = steps * topology.rounds - run.progress.done // topology.rows_per_round
    batches = run.batches_read + rounds
    return min(batches, most) if most else batches


def check_all_rows_are_read(run: Run, encoder: str) -> None:
    """Raise ConfigError if the last rows of a pass do not fill a step, and nothing completes it.

    Args:
        encoder: name of the TaskEncoder.
    """
    fork, topology = run.fork(), run.topology
    steps = sum(1 for _ in itertools.islice(fork.draw_steps(), run.options.pass_batches or None))
    if not fork.dropped_rows:
        return
    rows = steps * topology.rows_per_step + fork.dropped_rows
    other = f"pass limit={steps} to leave them out" if steps else "use smaller batches"
    raise ConfigError(
        f"{', '.join(run.keys)}: {rows:,} rows in batches of {topology.batch_rows} on "
        f"{topology.ranks} rank(s) leave {fork.dropped_rows} over. Give {encoder} a method "
        f"make_padding(row), whose rows complete the last batches and count as nothing, or {other}."
    )
