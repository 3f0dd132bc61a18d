# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Inside the states of Energon's loaders: one cursor for all, or the workers of private plans.

A shared plan has one cursor, which any worker of any rank can continue from. Private plans belong
to their workers: where the product of ranks and workers stays, the workers go on as they are, in
other ranks.
"""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass
from typing import Any, Iterator, Mapping, Sequence

from megatron.energon.rng import SystemRngState
from megatron.energon.savable_loader import (
    SavableDataLoaderState,
    SavableDatasetCheckpoint,
    SavableDatasetState,
)
from megatron.energon.state import FlexState

from energon_ext.errors import StateFormatError, StateMismatchError
from energon_ext.state.match import RETAINED, SourceChange
from energon_ext.state.schema import STATE_CLASS, check_format

#: What Energon's states call the dataset that makes virtual epochs.
EPOCHS = "EpochizeDataset"


@dataclass
class WorkerState:
    """What one worker of a run had done.

    Attributes:
        tree: state of its datasets.
        batches: that it had made when that was stored.
        rng: of the process, None without a process of its own.
        behind: batches that it has made since.
    """

    tree: FlexState
    batches: int
    rng: SystemRngState | None = None
    behind: int = 0


def workers_of(state: SavableDataLoaderState) -> int:
    """Worker processes of the rank that saved a state, 0 without any."""
    return 0 if isinstance(state.worker_states[0], dict) else len(state.worker_states)


def blends_in(state: SavableDataLoaderState) -> dict[int, FlexState]:
    """The state of the blend in every worker of a rank, by its number.

    Raises:
        StateMismatchError: stock Energon saved the state.
        StateFormatError: it is damaged.
    """
    return {number: blend_in(tree) for number, tree in enumerate(trees_in(state))}


def trees_in(state: SavableDataLoaderState) -> list[Any]:
    """The state of the datasets in every worker of a rank."""
    return [worker.tree for worker in workers_in(state)]


def blend_in(tree: Any) -> FlexState:
    """The state of the blend, below the loader's own wrappers."""
    blend: FlexState = _layers_of(tree)[-1]
    check_format(blend)
    return blend


def _layers_of(tree: Any) -> list[Any]:
    """States of the datasets around the blend, from the outermost in, and of the blend itself."""
    layers = [tree]
    while (
        isinstance(tree, Mapping)
        and tree.get("__class__") != STATE_CLASS
        and len(tree.get("datasets", ())) == 1
    ):
        tree = tree["datasets"][0]
        layers.append(tree)
    return layers


def last_stored(state: SavableDataLoaderState) -> tuple[FlexState, int]:
    """A state of a shared plan, and how many rounds of that run have gone out since."""
    workers = workers_in(state)
    last = (state.next_worker_id - 1) % len(workers)
    return blends_in(state)[last], workers[last].behind * len(workers)


def cursor_of(state: SavableDataLoaderState) -> FlexState:
    """The state of a shared plan after the last batch.

    Raises:
        StateFormatError: it is older, as a stock loader saves it.
    """
    cursor, rounds = last_stored(state)
    if rounds:
        raise StateFormatError(
            "A worker's state is some batches old; resume with the saved number of ranks and "
            "workers, or save with energon_ext.ExactDataLoader."
        )
    return cursor


def batches_of(state: SavableDataLoaderState) -> int:
    """Batches that the rank which saved a state had drawn."""
    return sum(worker.batches + worker.behind for worker in workers_in(state))


def wrappers_in(tree: Any) -> list[str]:
    """Class names of the datasets around the blend, in the state of a worker's datasets."""
    return [str(layer.get("__class__")) for layer in _layers_of(tree)[:-1]]


def epoch_offset_in(tree: Mapping[str, Any]) -> int:
    """Batches of a worker in its virtual epoch, 0 without."""
    around = _layers_of(tree)[:-1]
    return sum(int(each.get("_offset", 0)) for each in around if each.get("__class__") == EPOCHS)


def workers_in(state: SavableDataLoaderState) -> list[WorkerState]:
    """The workers of a rank, in their order."""
    found = []
    for worker in state.worker_states:
        if isinstance(worker, dict):
            found.append(WorkerState(worker["datasets"][0], worker["_sample_index"]))
        else:
            saved = worker.state
            own = saved.dataset_state, saved.sample_index, saved.rng, worker.offset
            found.append(WorkerState(*own))
    return found


def regrouped(
    states: Sequence[SavableDataLoaderState],
    rank: int,
    ranks: int,
    num_workers: int,
    epoch_length: int = 0,
) -> SavableDataLoaderState:
    """The state with which a rank continues private plans, of as many workers in all as before.

    Args:
        epoch_length: batches of a rank in a virtual epoch, 0 without.

    Raises:
        StateFormatError: a state from which no other can be made.
        StateMismatchError: another number of workers in all, or ranks made of them would have drawn
            unequally much.
    """
    old = [worker for state in states for worker in workers_in(state)]
    if behind := next((worker.behind for worker in old if worker.behind), 0):
        raise StateFormatError(
            f"A worker's state is {behind} batches old; resume with the saved number of ranks and "
            f"workers, and save at a multiple of the loader's save_every."
        )
    per_rank = max(1, num_workers)
    if len(old) != per_rank * ranks:
        raise StateMismatchError(
            {"workers of all ranks": (len(old), per_rank * ranks)},
            "A blend with a streamed source continues on as many workers in all: ranks x workers "
            "may change while their product stays. `energon-ext prepare` makes a planned source "
            "of any text, which continues on any number.",
        )
    of_ranks = [old[first : first + per_rank] for first in range(0, len(old), per_rank)]
    if not _drew_equally(of_ranks):
        raise StateMismatchError(
            {"batches of each worker": ([worker.batches for worker in old], "as many a rank")},
            "Save after a number of batches that all workers share, to continue in other ranks.",
        )
    own = of_ranks[rank]
    if epoch_length:
        in_epoch = sum(worker.batches for worker in own) % epoch_length
        for number, worker in enumerate(own):
            begun = len(range(number, in_epoch, per_rank)) % (epoch_length // per_rank)
            worker.tree = with_blend(worker.tree, blend_in(worker.tree), begun)
    return loader_state(own, num_workers, states[0].micro_batch_size)


def loader_state(
    workers: Sequence[WorkerState], num_workers: int, micro_batch_size: int | None
) -> SavableDataLoaderState:
    """The state of a rank's loader, of those of its workers."""
    batches = sum(worker.batches for worker in workers)
    worker_states: list[Any]
    if num_workers == 0:
        worker_states = [
            FlexState(
                __class__="SimpleSavableDatasetWrapper",
                datasets=[workers[0].tree],
                _sample_index=batches,
            )
        ]
    else:
        worker_states = [
            SavableDatasetCheckpoint(
                state=SavableDatasetState(
                    rng=worker.rng, dataset_state=worker.tree, sample_index=worker.batches
                ),
                offset=0,
            )
            for worker in workers
        ]
    return SavableDataLoaderState(
        worker_states=worker_states,
        next_worker_id=batches % len(workers),
        micro_batch_size=micro_batch_size,
    )


def with_blend(tree: FlexState, blend: FlexState, epoch_offset: int) -> FlexState:
    """The state of a dataset with another state of its blend.

    Args:
        tree: state of a fresh dataset.
        epoch_offset: batches of this worker in the present virtual epoch.
    """
    if tree.get("__class__") == STATE_CLASS:
        return blend
    own = copy.deepcopy({key: value for key, value in tree.items() if key != "datasets"})
    if tree.get("__class__") == EPOCHS:
        own["_offset"] = epoch_offset
    return FlexState(**own, datasets=[with_blend(tree["datasets"][0], blend, epoch_offset)])


def check_nothing_waits(state: SavableDataLoaderState, changes: Sequence[SourceChange]) -> None:
    """Refuse to leave a source that still has samples behind the draw.

    In Energon's order, shuffle and packing buffers lie behind the draw; the samples in them are
    read again on a resume, which a source that is gone cannot.

    Raises:
        StateMismatchError: names the sources and how many of their samples wait.
    """
    gone = {change.key for change in changes if change.change == RETAINED}
    waiting = Counter(
        key for tree in trees_in(state) for key in _keys_behind_draw(tree) if key in gone
    )
    if waiting:
        raise StateMismatchError(
            {f"samples of {key} in buffers": (count, 0) for key, count in waiting.items()},
            "A source with samples in a shuffle or packing buffer cannot leave; keep it with "
            "`weight: 0` until they are gone.",
        )


def _keys_behind_draw(state: Any) -> Iterator[str]:
    """The source of every restore key in a state, but for those inside the blend."""
    if isinstance(state, Mapping):
        if state.get("__class__") != STATE_CLASS:
            for value in state.values():
                yield from _keys_behind_draw(value)
    elif isinstance(state, tuple) and STATE_CLASS in state[:-1]:
        yield state[state.index(STATE_CLASS) + 1]
    elif isinstance(state, (list, tuple)):
        for value in state:
            yield from _keys_behind_draw(value)


def _drew_equally(of_ranks: Sequence[Sequence[WorkerState]]) -> bool:
    """Whether ranks made of these workers have drawn equally much, each worker in its turn."""
    counts = [[worker.batches for worker in own] for own in of_ranks]
    in_turn = all(own == sorted(own, reverse=True) and own[0] - own[-1] <= 1 for own in counts)
    return in_turn and len({sum(own) for own in counts}) == 1
