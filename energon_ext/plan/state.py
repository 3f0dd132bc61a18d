# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The cursor of a planned run: JSON values, the same on every rank.

Between two steps it continues under another mix, and on any ranks, workers and batch sizes. Inside
a step it also holds a digest of everything that the step depends on, and continues under the same
or not at all: the step is drawn again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Mapping

from energon_ext.errors import ConfigError
from energon_ext.packing import packing_of
from energon_ext.plan.clock import RowLengths
from energon_ext.plan.progress import Progress
from energon_ext.plan.row_source import RowSource
from energon_ext.state.match import (
    SourceChange,
    check_fingerprint,
    compare_sources,
    match_sources,
)
from energon_ext.state.schema import STATE_CLASS, STATE_VERSION, check_format, is_count

if TYPE_CHECKING:
    from energon_ext.plan.dataset import PlannedDataset


def cursor_of(dataset: "PlannedDataset", progress: Progress) -> dict[str, Any]:
    """The state of a dataset at some progress."""
    names = list(dataset.source_names.values())
    plan = dataset.plan.to_json(progress.plan, names)
    plan["sources"] = {**dataset.retained, **plan["sources"]}
    begun, weights = _begun(plan, progress.done), {}
    for live in dataset.live_weights:
        live.wait(begun - 1)  # until this process has what the planner had
        weights[live.key] = live.used(begun)
    return {
        "__class__": STATE_CLASS,
        "version": STATE_VERSION,
        "fingerprint": dict(dataset.fingerprint),
        "encoder": dict(dataset.batches.encoder),
        "axis": dataset.clock.axis.counted,
        "rows_per_step": dataset.topology.rows_per_step,
        "row_lengths": [list(each) for each in progress.plan.row_lengths],
        "plan": plan,
        "weights": weights,
        "done": progress.done,
        "read": progress.read,
        "skipped": [list(each) for each in progress.skipped],
        "inside": dataset.inside if progress.done else None,
    }


def restore_cursor(dataset: "PlannedDataset", state: Any) -> list[SourceChange]:
    """Put a dataset where a cursor stands; returns the change of every source.

    Raises:
        StateFormatError: the state is damaged, or of another version.
        StateMismatchError: it belongs to another configuration; names all that differs.
        ConfigError: the step that is open is to be skipped.
    """
    check_format(state)
    _check_configuration(dataset, state)
    if state["done"]:
        check_fingerprint(
            state["inside"] or {},
            dataset.inside,
            advice="The state was saved inside a step, which needs the weights, limits, excluded "
            "documents and packing buffers it was begun with; save at the end of a step to change "
            "them.",
        )
    saved, clock = state["plan"], dataset.clock
    if state["done"] and clock.is_skipped(saved["step"]):
        raise ConfigError(
            f"skip: step {saved['step']} was partly read when the state was saved; skip from "
            f"{saved['step'] + 1} on, or resume from a state that was saved between two steps."
        )
    row_lengths = _row_lengths(state, clock.row_tokens)
    position = clock.at(saved["step"], saved["row"], row_lengths)
    for live in dataset.live_weights:
        if live.key in state["weights"]:
            live.check_used(state["weights"][live.key], _begun(saved, state["done"]))
        # New members begin by the weights that held last: the next may not be decided yet.
        position = max(0, saved["step"] - 1)
    matched = match_sources(saved["sources"], dataset.source_names)
    plan = dataset.plan
    packing = packing_of(state["fingerprint"])
    for number, (key, rows) in enumerate(zip(dataset.keys, dataset.rows)):
        if key in matched:
            own = saved["sources"][matched[key]]
            _restore_rows(rows, own["rows"], own["packing"] or packing, dataset)
            plan.documents[number], plan.tokens[number] = own["documents"], own["tokens"]
    plan.step, plan.row, plan.row_lengths = saved["step"], saved["row"], row_lengths
    plan.begin_here()
    renamed = {old: key for key, old in matched.items() if old != key}
    plan.mixture.restore_state(saved["mixture"], renamed, position)
    claimed = set(matched.values())
    dataset.retained = {
        key: {**own, "packing": own["packing"] or packing}
        for key, own in saved["sources"].items()
        if key not in claimed
    }
    skipped = tuple((first, stop) for first, stop in state["skipped"])
    dataset.progress = Progress(plan.advance(), state["done"], state["read"], skipped)
    return compare_sources([saved["sources"]], dataset.source_names)


def _check_configuration(dataset: "PlannedDataset", state: Mapping[str, Any]) -> None:
    """Compare fingerprints; between two steps, text may be packed by other options."""
    saved, current = state["fingerprint"], dataset.fingerprint
    if not state["done"] and all(rows.may_be_repacked for rows in dataset.rows):
        saved, current = ({**each} for each in (saved, current))
        for fields in (saved, current):
            for name in packing_of(fields):
                del fields[name]
    check_fingerprint(saved, current)


def _row_lengths(state: Mapping[str, Any], now: int) -> RowLengths:
    """How long earlier rows were, where rows have another length now."""
    earlier = tuple((row, length) for row, length in state["row_lengths"])
    length, row = state["fingerprint"].get("seq_len"), state["plan"]["row"]
    if is_count(length) and row and now not in (0, length):
        earlier += ((row, length),)
    return earlier


def _restore_rows(
    rows: RowSource, state: Mapping[str, Any], packing: Mapping[str, Any], dataset: "PlannedDataset"
) -> None:
    """Put rows where a state has them that was packed by some options."""
    rows.check_state(state)
    now = packing_of(dataset.fingerprint)
    if not rows.may_be_repacked:
        check_fingerprint(packing, now, rows.key)
    rows.restore_state(state, None if packing == now else rows.former_packer(packing))


def _begun(plan: Mapping[str, Any], done: int) -> int:
    """Steps that were begun when a state was saved."""
    return int(plan["step"]) + (done > 0)
