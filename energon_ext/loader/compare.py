# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Whether a loader can continue a state: asked before anything has changed, and before a worker
has started."""

from __future__ import annotations

from typing import Any

from megatron.energon.flavors.base_dataset import SavableDataset
from megatron.energon.savable_loader import SavableDataLoaderState
from megatron.energon.wrappers.epochize_dataset import EpochizeDataset

from energon_ext.errors import StateMismatchError
from energon_ext.loader.regroup import (
    blends_in,
    check_nothing_waits,
    epoch_offset_in,
    trees_in,
    workers_of,
    wrappers_in,
)
from energon_ext.loader.seals import place_of
from energon_ext.plan.dataset import BlendedDataset
from energon_ext.plan.lookup import blends_inside
from energon_ext.state.match import (
    SourceChange,
    SourceNames,
    check_fingerprint,
    compare_sources,
    match_sources,
)


def check_continues(
    state: SavableDataLoaderState, dataset: SavableDataset, num_workers: int, batch_size: int | None
) -> list[SourceChange]:
    """Refuse the state of another configuration; say what becomes of each source of this one.

    Args:
        state: of the loader of a rank, whole.
        dataset: of the loader that is to continue it.

    Raises:
        StateFormatError: the state of a source is damaged.
        StateMismatchError: another configuration; names all that differs.
    """
    check_loader(state, dataset, num_workers, batch_size)
    changes: list[SourceChange] = []
    for blend in blends_inside(dataset):
        blends_in(state)  # refuses what stock Energon has saved
        around = [wrappers_in(tree) for tree in trees_in(state)]
        check_fingerprint(
            {"datasets around the blend": around},
            {"datasets around the blend": [_wrappers_of(dataset)] * len(around)},
        )
        changes = check_blend(state, blend)
    return changes


def check_loader(
    state: SavableDataLoaderState, dataset: SavableDataset, num_workers: int, batch_size: int | None
) -> None:
    """The part of :func:`check_continues` on workers and batches."""
    check_fingerprint(
        {"num_workers": workers_of(state), "batch_size": state.micro_batch_size},
        {"num_workers": num_workers, "batch_size": batch_size},
    )
    length = virtual_epoch_length(dataset)
    if state.next_worker_id and length:
        first = epoch_offset_in(trees_in(state)[0]) + state.worker_states[0].offset
        if first % (length // num_workers) == 0:
            # Its state does not say so, and it would begin its next epoch at once.
            raise StateMismatchError(
                {"worker 0 in its virtual epoch": ("at the end, and others not", "among others")},
                "Save after a multiple of num_workers batches, or earlier in an epoch.",
            )


def check_blend(state: SavableDataLoaderState, blend: BlendedDataset) -> list[SourceChange]:
    """The part of :func:`check_continues` on the sources."""
    saved = blends_in(state)
    for number, worker in saved.items():
        place = place_of(state.worker_states[number]) if blend.is_shared else None
        if place is not None:
            check_fingerprint(
                {"ranks": place["ranks"], "worker": place["worker"]},
                {"ranks": blend.topology.ranks, "worker": number},
                advice="restore_states() continues on other ranks and workers.",
            )
        blend.check_state(worker, worker=number)
        states = worker["plan"]["sources"]
        for key, saved_key in match_sources(states, names_of(blend)).items():
            blend.sources[key].rows.check_state(states[saved_key]["rows"])
    workers = sorted(saved.values(), key=lambda worker: worker["plan"]["row"])
    changes = compare_sources(workers[-1:] if blend.is_shared else workers, names_of(blend))
    check_nothing_waits(state, changes)
    return changes


def virtual_epoch_length(dataset: SavableDataset) -> int:
    """Batches of a rank in a virtual epoch, 0 without."""
    found = dataset._find_wrapped_dataset(EpochizeDataset)
    return 0 if found is None else int(found.length)


def names_of(blend: BlendedDataset) -> dict[str, SourceNames]:
    """By which the state of each source is found."""
    return {key: source.names for key, source in blend.sources.items()}


def _wrappers_of(dataset: Any) -> list[str]:
    """Class names of the datasets around the blend."""
    if isinstance(dataset, BlendedDataset):
        return []
    return [type(dataset).__name__, *_wrappers_of(dataset.datasets[0])]
