# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Settings that a saved state depends on, as JSON values; long ones are replaced by digests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Mapping

from energon_ext.plan.cost import digest_of_cost
from energon_ext.state.match import check_fingerprint
from energon_ext.state.schema import digest_of

if TYPE_CHECKING:
    from energon_ext.plan.dataset import PlannedDataset

#: A setting that only states of Energon's loader with workers contain.
_WORKERS = "workers"


def step_settings(dataset: "PlannedDataset") -> dict[str, Any]:
    """Return everything that the draw of a step depends on apart from the plan."""
    cost, clock, topology = dataset.batches.cost, dataset.clock, dataset.topology
    options: dict[str, list[Any]] = {}
    for key, rows in zip(dataset.keys, dataset.rows):
        for name, value in rows.options().items():
            options.setdefault(name, []).append([key, value])
    return {
        "rows_per_step": topology.rows_per_step,
        "batch_size": topology.batch_rows,
        "ranks": topology.ranks,
        "axis": clock.axis.counted,
        "cost": None if cost is None else digest_of_cost(cost, clock.row_tokens),
        "mixture": digest_of(dataset.tree.to_json())[:16],
        **{name: digest_of(values)[:16] for name, values in options.items()},
    }


def worker_settings(dataset: "PlannedDataset") -> dict[str, Any]:
    """Return everything that the batches of one worker of Energon's loader depend on.

    The workers of a rank are saved after different batches. Each of them draws the steps in between
    again, so all must draw them as before.
    """
    return {
        **dataset.step_settings,
        _WORKERS: dataset.topology.workers,
        "skip": [list(each) for each in dataset.clock.skip],
        "virtual_epoch_length": dataset.passes.batches,
    }


def check_settings(dataset: "PlannedDataset", saved: Mapping[str, Any]) -> None:
    """Raise StateMismatchError if settings that a state depends on have changed."""
    if _WORKERS in saved:
        current = dataset.worker_settings
        reason = "Energon's loader saved the state with workers, which are at different batches"
        advice = "keep these settings, or use ExactDataLoader, whose states allow changes"
    else:
        current = dataset.step_settings
        reason = (
            "The state was saved inside a step, which must be finished with the same weights, "
            "limits, excluded documents and packing buffers"
        )
        advice = "to change them, save at the end of a step"
    check_fingerprint(saved, current, advice=f"{reason}; {advice}.")
