# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The states of Energon's loaders: sealed when they are saved, checked before they are used.

Each worker's state gets a digest of itself, and of what the loader around it says: whose turn is
next, and how large a batch is. It moves with the worker, so tools that put workers into other ranks
may do so between two rounds.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Mapping

from megatron.energon.savable_loader import (
    SavableDataLoaderState,
    SavableDatasetCheckpoint,
    SavableDatasetState,
)
from megatron.energon.state import FlexState

from energon_ext.errors import StateFormatError
from energon_ext.state.schema import SEAL, digest_of, is_count

#: What a sealed worker's state says of the loader it was in.
PLACE = "energon_ext_place"


def sealed_workers(state: SavableDataLoaderState, ranks: int) -> SavableDataLoaderState:
    """The state with a digest in that of every worker; it may be sealed already.

    Args:
        ranks: of the run.
    """
    workers = []
    for number, worker in enumerate(state.worker_states):
        place = {
            "ranks": ranks,
            "workers": len(state.worker_states),
            "worker": number,
            "next_worker_id": state.next_worker_id,
            "micro_batch_size": state.micro_batch_size,
        }
        worker = _with_tree(worker, {**_tree_of(worker), PLACE: place})
        workers.append(_with_tree(worker, {**_tree_of(worker), SEAL: _digest_of(worker)}))
    return dataclasses.replace(state, worker_states=workers)


def place_of(worker: Any) -> Mapping[str, Any] | None:
    """What a worker's state says of the loader it was in; None of a stock one."""
    return _tree_of(worker).get(PLACE)


def check_workers(state: Any) -> None:
    """Refuse a state of a loader that is damaged; a stock one carries no digest.

    Raises:
        StateFormatError: it is not what was saved.
    """
    if not isinstance(state, SavableDataLoaderState):
        raise StateFormatError(
            f"The data state is a {type(state).__name__}, not what save_state() returned. Restore "
            f"another checkpoint; the data is not started over in its place."
        )
    workers = state.worker_states
    if not isinstance(workers, list) or not workers:
        raise StateFormatError("A data state without workers was found; it is damaged.")
    turn, size = state.next_worker_id, state.micro_batch_size
    if not (is_count(turn) and turn < len(workers) and (size is None or is_count(size))):
        raise StateFormatError(
            f"next_worker_id {turn!r:.80} and micro_batch_size {size!r:.80} found in a state of "
            f"{len(workers)} workers; it is damaged."
        )
    kind = type(workers[0])
    for number, worker in enumerate(workers):
        if type(worker) is not kind or not _is_whole(worker, len(workers)):
            raise StateFormatError(
                f"Worker {number} of a data state is damaged, or had not begun when it was saved; "
                f"restore another checkpoint."
            )
    seals = [SEAL in _tree_of(worker) for worker in workers]
    for number, worker in enumerate(workers):
        if any(seals) and not _is_as_saved(worker, turn, size):
            raise StateFormatError(
                f"The data state of worker {number} is not what was saved: its digest differs. "
                f"Copy it again from where it came, or take another checkpoint."
            )


def _is_whole(worker: Any, workers: int) -> bool:
    """Whether a worker's state has the form that Energon gives it."""
    if type(worker) is FlexState:
        inner = worker.get("datasets")
        is_tree = isinstance(inner, list) and len(inner) == 1 and isinstance(inner[0], FlexState)
        return workers == 1 and is_tree and is_count(worker.get("_sample_index"))
    if type(worker) is not SavableDatasetCheckpoint or not is_count(worker.offset):
        return False
    saved = worker.state
    return (
        type(saved) is SavableDatasetState
        and isinstance(saved.dataset_state, FlexState)
        and is_count(saved.sample_index)
    )


def _is_as_saved(worker: Any, next_worker_id: int, micro_batch_size: int | None) -> bool:
    place = place_of(worker)
    if _tree_of(worker).get(SEAL) != _digest_of(worker) or not isinstance(place, Mapping):
        return False
    said = place["next_worker_id"], place["micro_batch_size"]
    return said == (next_worker_id, micro_batch_size)


def _tree_of(worker: Any) -> Mapping[str, Any]:
    """The state of the datasets of a worker."""
    return worker if isinstance(worker, Mapping) else worker.state.dataset_state


def _with_tree(worker: Any, tree: Mapping[str, Any]) -> Any:
    if isinstance(worker, Mapping):
        return FlexState(tree)
    state = dataclasses.replace(worker.state, dataset_state=FlexState(tree))
    return dataclasses.replace(worker, state=state)


def _digest_of(worker: Any) -> str:
    tree = {key: value for key, value in _tree_of(worker).items() if key != SEAL}
    return digest_of(_with_tree(worker, tree))
