# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The cursor of a planned run: JSON values, the same on every rank.

A run that was saved between two steps may continue with another mix, and with any number of ranks
and workers and any batch size. A cursor saved inside a step also contains digests of everything
that the step depends on: none of it may change, since the step is drawn again on a resume.
"""

from __future__ import annotations

import copy
import json
from typing import Any, Mapping

from energon_ext.errors import ConfigError, RankError
from energon_ext.plan.clock import RowLengths
from energon_ext.plan.progress import Progress
from energon_ext.plan.rows import Rows
from energon_ext.plan.run import Run
from energon_ext.plan.spec import PACKING, Spec
from energon_ext.state.match import (
    SourceChange,
    check_fingerprint,
    compare_sources,
    match_sources,
)
from energon_ext.state.schema import (
    STATE_CLASS,
    STATE_VERSION,
    digest_of,
    read_format,
    without_seal,
)

#: A setting that only states of Energon's loader with workers contain.
_WORKERS = "workers"


def save_cursor(run: Run, progress: Progress | None = None) -> dict[str, Any]:
    """Return the cursor of a run, now or at some earlier progress, as JSON would give it back."""
    progress = progress or run.progress
    names = list(run.source_names.values())
    plan = run.plan.to_json(progress.plan, names)
    if (row_tokens := progress.plan.row_tokens) != run.clock.row_tokens:
        for source in plan["sources"].values():
            source["packing"] = _packing_now(run, source["rows"]["kind"], row_tokens)
    plan["sources"] = {**copy.deepcopy(run.retained), **plan["sources"]}
    begun, weights = _begun(plan, progress.done), {}
    for live in run.live_weights:
        live.wait(begun - 1)  # the planner may be another process that has read more lines
        weights[live.key] = live.describe_used(begun)
    return {
        "__class__": STATE_CLASS,
        "version": STATE_VERSION,
        "spec": json.loads(json.dumps(run.spec.to_json())),  # may have tuples or enums of a user
        "axis": run.clock.axis.counted,
        "rows_per_step": run.topology.rows_per_step,
        "row_lengths": [list(each) for each in progress.plan.row_lengths],
        "data_digests": _data_digests(run, plan["step"]),
        "plan": plan,
        "weights": weights,
        "done": progress.done,
        "read": progress.read,
        "skipped": [list(each) for each in progress.skipped],
        "inside": dict(run.step_settings) if progress.done else None,
        **({"loss_weights": run.loss_weights_as_json} if run.loss_weights else {}),
        **({"row_schedule": run.clock.rows.to_json()} if run.clock.rows else {}),
        # A resume may change these two, but the ranks of a run may not differ in them.
        **({"skip": [list(each) for each in run.clock.skip]} if run.clock.skip else {}),
        **({"virtual_epoch_length": batches} if (batches := run.options.pass_batches) else {}),
    }


def save_cursor_of_plan(run: Run) -> dict[str, Any]:
    """Return the cursor after the last step that a fork has drawn."""
    return save_cursor(run, Progress(run.plan.save_whole_state()))


def fork_at(run: Run, state: Mapping[str, Any]) -> Run:
    """Return a run over the same data that continues from a cursor, to answer questions.

    A step that was partly read comes first, as a whole.

    Raises: see :func:`restore_cursor`.
    """
    other = copy.copy(run)
    other.is_fork = True
    restore_cursor(other, {**without_seal(state), "done": 0, "inside": None})
    return other


def digest_of_state(state: Mapping[str, Any]) -> str:
    """Return a digest of a cursor without paths.

    Runs whose states have the same one have read the same rows, in whichever folders, and will read
    the same ones if they continue with the same data.
    """
    weights = sorted(used["digest"] for used in state["weights"].values())
    place = [state[name] for name in ("done", "read", "skipped")]
    return digest_of([state["data_digests"], state["plan"]["row"], weights, *place])[:16]


def _data_digests(run: Run, step: int) -> list[list[Any]]:
    """Return spans ``[stop, digest]``: the steps up to ``stop`` were planned with these data.

    The last span is that of the run itself.
    """
    spans: list[list[Any]] = []
    for stop, digest in run.earlier_digests:
        if stop > (spans[-1][0] if spans else 0):  # not of a run that was saved at once
            spans.append([stop, digest])
    if spans and spans[-1][1] == run.data_digest:
        spans.pop()
    return [*spans, [step, run.data_digest]]


def restore_cursor(run: Run, state: Any) -> list[SourceChange]:
    """Continue a run from a cursor, with or without its digest; return the change of every source.

    A cursor that is refused changes nothing.

    Raises:
        StateFormatError: the state is damaged, or has another format version.
        StateMismatchError: it belongs to another configuration; the message lists all differences.
        ConfigError: it was saved inside a step that is now to be skipped.
    """
    restored = copy.copy(run)
    restored.restart()
    changes = _restore(restored, read_format(without_seal(state)))
    run.adopt(restored)
    return changes


def check_same_run(run: Run, state: Mapping[str, Any]) -> None:
    """Raise RankError unless a run reads the rows that follow a state of another rank."""
    own, other = map(_same_on_all_ranks, (save_cursor(run), state))
    if differing := [name for name, value in own.items() if value != other[name]]:
        raise RankError(
            f"This rank would read other rows than the rank whose state it has: they differ in "
            f"{', '.join(differing)}. Every rank plans the whole run, so start all of them with "
            f"the same metadataset, arguments and files."
        )


def _same_on_all_ranks(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the states of all ranks have in common, apart from their place."""
    loss_weights = state.get("loss_weights", {}).values()  # of keys, which may have other paths
    return {
        "the cost of rows": state["spec"]["cost"],
        "contexts": state["spec"].get("contexts"),
        "skip": state.get("skip"),
        "virtual_epoch_length": state.get("virtual_epoch_length"),
        "loss_weight": sorted(map(digest_of, loss_weights)),
        "data or settings": state["data_digests"][-1:],
    }


def _restore(run: Run, state: Mapping[str, Any]) -> list[SourceChange]:
    _check_configuration(run, state)
    if state["done"] or state["inside"] is not None:
        _check_settings(run, state["inside"] or {})
    if state["done"]:
        _check_not_skipped(run, state)
    saved, plan = state["plan"], run.plan
    row_lengths = _row_lengths(state, run.clock.row_tokens)
    position = run.clock.at(saved["step"], saved["row"], row_lengths)
    if (row_tokens := run.clock.row_tokens_at(position)) != plan.row_tokens:
        plan.repack(row_tokens)
    for live in run.live_weights:
        if live.key in state["weights"]:
            live.check_used(state["weights"][live.key], _begun(saved, state["done"]))
        # New members start with the last weights used: later ones may not be decided yet.
        position = max(0, saved["step"] - 1)
    matched = match_sources(saved["sources"], run.source_names)
    spec = Spec.from_json(state["spec"])
    for number, key in enumerate(run.keys):
        if key in matched:
            source = saved["sources"][matched[key]]
            rows = plan.rows(number)
            current = _packing_now(run, rows.kind, row_tokens)
            _restore_rows(rows, source["rows"], _packing(source, spec), current)
            plan.documents[number], plan.tokens[number] = source["documents"], source["tokens"]
    plan.step, plan.row, plan.row_lengths = saved["step"], saved["row"], row_lengths
    plan.adopt_rows()
    renamed = {old: key for key, old in matched.items() if old != key}
    plan.mixture.restore_state(saved["mixture"], renamed, position)
    claimed = set(matched.values())
    run.retained = {
        key: {**source, "packing": _packing(source, spec)}
        for key, source in saved["sources"].items()
        if key not in claimed
    }
    run.earlier_digests = tuple((stop, digest) for stop, digest in state["data_digests"])
    skipped = tuple((first, stop) for first, stop in state["skipped"])
    run.progress = Progress(plan.save_whole_state(), state["done"], state["read"], skipped)
    return compare_sources([saved["sources"]], run.source_names)


def _packing_now(run: Run, kind: str, row_tokens: int) -> Mapping[str, Any]:
    """Return what packs rows of a kind, and of this length if they have a schedule."""
    packing = run.spec.packing(kind)
    return packing if run.clock.rows is None else {**packing, "row_tokens": row_tokens}


def _packing(source: Mapping[str, Any], spec: Spec) -> Mapping[str, Any]:
    """Return what packed the rows of a saved source; of one that is away, it is saved with it."""
    packing: Mapping[str, Any] | None = source["packing"]
    return spec.packing(source["rows"]["kind"]) if packing is None else packing


def _check_configuration(run: Run, state: Mapping[str, Any]) -> None:
    """Compare specs; the packing may change if no step is fixed and all sources allow it."""
    saved, current = Spec.from_json(state["spec"]).compared(), run.spec.compared()
    is_open = state["done"] or state["inside"] is not None
    if not is_open and all(each.first_rows.may_be_repacked for each in run.sources.values()):
        for fields in (saved, current):
            for name in PACKING:
                fields.pop(name, None)
    check_fingerprint(saved, current)


def _check_not_skipped(run: Run, state: Mapping[str, Any]) -> None:
    """Raise ConfigError if the step in which a state was saved must be skipped now."""
    step = state["plan"]["step"]
    if run.clock.is_skipped(step):
        raise ConfigError(
            f"skip: step {step} was partly read when the state was saved; skip steps from "
            f"{step + 1} on, or resume from a state that was saved between two steps."
        )


def _row_lengths(state: Mapping[str, Any], current: int) -> RowLengths:
    """Return the lengths of earlier rows; the saved length is one if the current one differs."""
    earlier = tuple((row, length) for row, length in state["row_lengths"])
    length, row = state["spec"]["row_tokens"], state["plan"]["row"]
    if length and current not in (0, length) and row > (earlier[-1][0] if earlier else 0):
        earlier += ((row, length),)
    return earlier


def _restore_rows(
    rows: Rows, state: Mapping[str, Any], packing: Mapping[str, Any], current: Mapping[str, Any]
) -> None:
    """Restore rows to a state that ``packing`` has packed, to continue in those of ``current``."""
    rows.check_state(state)
    if not rows.may_be_repacked:
        check_fingerprint(packing, current, rows.key)
    rows.restore_state(state, None if packing == current else packing)


def _check_settings(run: Run, saved: Mapping[str, Any]) -> None:
    """Raise StateMismatchError if settings that a state depends on have changed."""
    if _WORKERS in saved:
        current = run.worker_settings
        reason = "Energon's loader saved the state with workers, which are at different batches"
        advice = "keep these settings, or use ExactDataLoader, whose states allow changes"
    else:
        current = run.step_settings
        reason = (
            "The state was saved inside a step, which must be finished with the same weights, "
            "limits, excluded documents, subsets, blocks and packing buffers"
        )
        advice = "to change them, save at the end of a step"
    check_fingerprint(saved, current, advice=f"{reason}; {advice}.")


def _begun(plan: Mapping[str, Any], done: int) -> int:
    """Return the number of steps begun when a state was saved."""
    return int(plan["step"]) + (done > 0)
