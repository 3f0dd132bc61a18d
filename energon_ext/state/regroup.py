# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The states of all ranks of a run, for another number of ranks and workers.

Where the product of ranks and workers stays, the workers go on as they are, in other ranks. Sources
that are addressed by index continue on any number: what the old workers held in their
buffers and what none of them had reached is dealt to the new ones. Nothing of an epoch is lost or
repeated; the rows are other rows, since other documents meet in a worker.
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

from energon_ext.config.source_key import global_workers
from energon_ext.errors import StateFormatError, StateMismatchError
from energon_ext.mixture.choice import ChoiceDataset, Source
from energon_ext.mixture.choosers import part_of, redealt_chooser_state
from energon_ext.state.match import (
    PARKED,
    STATE_CLASS,
    STATE_VERSION,
    SourceChange,
    check_fingerprint,
    check_format,
    is_index_addressed,
    match_sources,
)


@dataclass
class _Worker:
    """What one worker of the saved run had done.

    Attributes:
        tree: state of its datasets.
        batches: that it made.
        rng: of the process, None without a process of its own.
    """

    tree: FlexState
    batches: int
    rng: SystemRngState | None = None


def state_for_rank(
    states: Sequence[SavableDataLoaderState], choice: ChoiceDataset
) -> SavableDataLoaderState:
    """The state with which a rank continues a run.

    Its own, where the run has as many ranks and workers as before. Where their product stays, the
    workers go on as they are, in other ranks. Else the sources are dealt anew.

    Args:
        states: of every rank of the saved run, in their order.
        choice: of the dataset of this rank.

    Raises:
        StateMismatchError: another configuration, or a source that only the saved number of workers
            can continue.
        StateFormatError: a state from which no other can be made.
    """
    config = choice.worker_config
    if [workers_of(state) for state in states] == [config.num_workers] * config.world_size:
        return states[config.rank]
    old = [worker for state in states for worker in _workers_in(state)]
    if len(old) == global_workers(config) and _can_be_regrouped(old, config.world_size):
        per_rank = max(1, config.num_workers)
        new = old[config.rank * per_rank : (config.rank + 1) * per_rank]
    else:
        new = _redealt_workers(old, choice)
    return _loader_state(new, config.num_workers, states[0].micro_batch_size)


def _can_be_regrouped(workers: Sequence[_Worker], ranks: int) -> bool:
    """Whether ranks made of these workers have drawn equally much, each worker in its turn."""
    counts = [worker.batches for worker in workers]
    per_rank = len(counts) // ranks
    of_ranks = [counts[rank * per_rank : (rank + 1) * per_rank] for rank in range(ranks)]
    in_turn = all(own == sorted(own, reverse=True) and own[0] - own[-1] <= 1 for own in of_ranks)
    return in_turn and len({sum(own) for own in of_ranks}) == 1


def _redealt_workers(old: Sequence[_Worker], choice: ChoiceDataset) -> list[_Worker]:
    config = choice.worker_config
    per_rank = max(1, config.num_workers)
    wanted = range(config.rank * per_rank, (config.rank + 1) * per_rank)
    choices = redeal(
        choice, [_choice_in(worker.tree) for worker in old], global_workers(config), wanted
    )
    batches = sum(worker.batches for worker in old) // config.world_size
    # Of the batches of a rank, worker w makes those with the numbers w, w + W, ...
    return [
        _Worker(_with_choice(old[0].tree, state), -(-(batches - local) // per_rank))
        for local, state in enumerate(choices)
    ]


def _loader_state(
    workers: Sequence[_Worker], num_workers: int, micro_batch_size: int | None
) -> SavableDataLoaderState:
    batches = sum(worker.batches for worker in workers)
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


def redeal(
    choice: ChoiceDataset, states: Sequence[FlexState], workers: int, wanted: Sequence[int]
) -> list[FlexState]:
    """The states of some of ``workers`` workers that continue what others did.

    Args:
        choice: of now.
        states: of the choice in every old worker, in their order.
        workers: how many there are now, over all ranks.
        wanted: the numbers of those whose states are returned.
    """
    for number, state in enumerate(states):
        check_format(state)
        check_fingerprint(
            {**state["fingerprint"], "global_worker": state["global_worker"]},
            {**choice.fingerprint, "global_workers": len(states), "global_worker": number},
        )
    sources = [state["sources"] for state in states]
    _check_index_addressed(sources[0], len(states), workers)
    matched = {saved: key for key, saved in match_sources(sources[0], choice.names).items()}
    by_worker: list[dict[str, FlexState]] = [{} for _ in wanted]
    for key in sources[0]:
        source = choice.sources.get(matched.get(key))
        parts = _redealt_source(source, [each[key] for each in sources], workers, wanted)
        for own, part in zip(by_worker, parts):
            own[key] = part
    choosers = [state["chooser"] for state in states if state["chooser"] is not None]
    return [
        FlexState(
            __class__=STATE_CLASS,
            version=STATE_VERSION,
            fingerprint={**choice.fingerprint, "global_workers": workers},
            global_worker=worker,
            chooser=_redealt_chooser(choosers, worker, workers),
            sources=FlexState(own),
        )
        for worker, own in zip(wanted, by_worker)
    ]


def workers_of(state: SavableDataLoaderState) -> int:
    """Worker processes of the rank that saved a state, 0 without any."""
    return 0 if isinstance(state.worker_states[0], dict) else len(state.worker_states)


def choices_in(state: SavableDataLoaderState) -> dict[int, FlexState]:
    """The state of the choice in every worker of a rank that had begun, by its number.

    Raises:
        StateMismatchError: stock Energon saved the state.
    """
    return {
        number: _choice_in(
            worker["datasets"][0] if isinstance(worker, dict) else worker.state.dataset_state
        )
        for number, worker in enumerate(state.worker_states)
        if isinstance(worker, dict) or worker.state is not None
    }


def check_nothing_waits(state: SavableDataLoaderState, changes: Sequence[SourceChange]) -> None:
    """Refuse to park a source that still has samples behind the choice.

    In Energon's order, shuffle and packing buffers lie behind the choice; the samples in them are
    read again on a resume, which a source that is gone cannot.

    Raises:
        StateMismatchError: names the sources and how many of their samples wait.
    """
    parked = {change.key for change in changes if change.change == PARKED}
    waiting = Counter(
        key
        for worker in state.worker_states
        if isinstance(worker, dict) or worker.state is not None
        for key in _keys_behind_choice(
            worker if isinstance(worker, dict) else worker.state.dataset_state
        )
        if key in parked
    )
    if waiting:
        raise StateMismatchError(
            {f"samples of {key} in buffers": (count, 0) for key, count in waiting.items()},
            "A source with samples in a shuffle or packing buffer cannot leave; keep it with "
            "`weight: 0` until they are gone.",
        )


def _keys_behind_choice(state: Any) -> Iterator[str]:
    """The source of every restore key in a state, but for those inside the choice."""
    if isinstance(state, Mapping):
        if state.get("__class__") != STATE_CLASS:
            for value in state.values():
                yield from _keys_behind_choice(value)
    elif isinstance(state, tuple) and STATE_CLASS in state[:-1]:
        yield state[state.index(STATE_CLASS) + 1]
    elif isinstance(state, (list, tuple)):
        for value in state:
            yield from _keys_behind_choice(value)


def _redealt_source(
    source: Source | None, entries: Sequence[FlexState], workers: int, wanted: Sequence[int]
) -> list[FlexState]:
    """The new states of one source; a parked one waits with the old ones."""
    first = entries[0]
    undealt = first.get("undealt") or [entry["dataset"] for entry in entries]
    datasets: Sequence[FlexState | None] = [None] * len(wanted)
    if source is not None:
        datasets, undealt = source.dataset.redeal(undealt, workers, wanted), None
    left = [entry["left_after"] for entry in entries]
    return [
        FlexState(
            dataset=dataset,
            undealt=undealt,
            rows=part_of(sum(entry["rows"] for entry in entries), worker, workers),
            tokens=part_of(sum(entry["tokens"] for entry in entries), worker, workers),
            # Where some had read all of theirs, what the others had left is now everyone's.
            left_after=None if None in left else left[0],
            identity=first["identity"],
            order=first["order"],
        )
        for worker, dataset in zip(wanted, datasets)
    ]


def _redealt_chooser(choosers: Sequence[Sequence], worker: int, workers: int) -> list | None:
    if not choosers:
        return None
    kind = choosers[0][0]
    return [kind, redealt_chooser_state([state for _, state in choosers], worker, workers)]


def _check_index_addressed(
    entries: Mapping[str, FlexState], old_workers: int, workers: int
) -> None:
    differences = {
        f"workers of all ranks, for {key}": (old_workers, workers)
        for key, entry in entries.items()
        if not is_index_addressed(entry)
    }
    if differences:
        raise StateMismatchError(
            differences,
            "Only token files and spliced documents continue on any number of workers. Use as many "
            "as before: ranks x workers may change while their product stays, at a save after "
            "which every rank has drawn as many batches.",
        )


def _workers_in(state: SavableDataLoaderState) -> list[_Worker]:
    found = []
    for worker in state.worker_states:
        if isinstance(worker, dict):
            found.append(_Worker(worker["datasets"][0], worker["_sample_index"]))
        elif worker.state is None:
            raise StateFormatError(
                "A worker had not begun when the state was saved; resume with the saved number of "
                "ranks and workers, and save again after the first batches."
            )
        elif worker.offset:
            raise StateFormatError(
                f"A worker's state is {worker.offset} batches old; resume with the saved number of "
                f"ranks and workers, and save at a multiple of the loader's save_every."
            )
        else:
            saved = worker.state
            found.append(_Worker(saved.dataset_state, saved.sample_index, saved.rng))
    return found


def _choice_in(tree: FlexState) -> FlexState:
    """The state of the choice, below the loader's own wrappers."""
    while tree.get("__class__") != STATE_CLASS and len(tree.get("datasets", ())) == 1:
        tree = tree["datasets"][0]
    check_format(tree)
    return tree


def _with_choice(tree: FlexState, choice: FlexState) -> FlexState:
    if tree.get("__class__") == STATE_CLASS:
        return choice
    if tree.get("__class__") == "LimitDataset":
        raise StateFormatError(
            "A run with a virtual_epoch_length continues with the saved number of ranks and "
            "workers only, since each worker counts its part of the epoch."
        )
    own = copy.deepcopy({key: value for key, value in tree.items() if key != "datasets"})
    return FlexState(**own, datasets=[_with_choice(tree["datasets"][0], choice)])
