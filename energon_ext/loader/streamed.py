# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Energon's own loader over a streamed blend, with the methods of :class:`ExactDataLoader`.

Its state belongs to one rank: it continues on the ranks x workers that saved it.
"""

from __future__ import annotations

import copy
import time
from typing import Any, Iterator, Mapping

from megatron.energon import SavableDataLoader, WorkerConfig
from megatron.energon.flavors.base_dataset import SavableDataset
from megatron.energon.savable_loader import SavableDataLoaderState
from torch.utils.data._utils import signal_handling

from energon_ext.errors import ConfigError, StateFormatError, StateMismatchError
from energon_ext.loader.data_loader import ExactDataLoader, log_resume
from energon_ext.plan.dataset import PlannedDataset
from energon_ext.plan.lookup import find_blend
from energon_ext.state.match import (
    ENCODER,
    RETAINED,
    SourceChange,
    check_fingerprint,
    compare_sources,
)
from energon_ext.state.plain import from_plain, to_plain
from energon_ext.state.schema import COUNT, check_class, check_seal, check_shape, sealed
from energon_ext.streamed.blend import STATE_CLASS, StreamedBlend

_CLASS, _VERSION = "EnergonExtStreamed", 1
_SHAPE = {
    "__class__": str,
    "version": COUNT,
    "topology": {"ranks": COUNT, "workers": COUNT, "batch_size": COUNT},
    "drawn": COUNT,
    "state": (None, {str: object}),
}


def open_loader(dataset: SavableDataset, **options: Any) -> Any:
    """The loader of a dataset: exact for a planned one, Energon's for a streamed one.

    Args:
        **options: of :class:`~energon_ext.ExactDataLoader`, or of
            ``megatron.energon.get_savable_loader``.
    """
    if isinstance(find_blend(dataset), PlannedDataset):
        return ExactDataLoader(dataset, **options)
    return StreamedLoader(dataset, **options)


class StreamedLoader:
    """Iterates a streamed dataset.

    A resume is exact at every batch, but for what Energon's loader leaves out: without workers it
    saves no random numbers of torch, numpy and random, which an encoder may draw; with several, a
    virtual epoch is exact only where it is saved after a multiple of ``num_workers`` batches.

    Args:
        dataset: of :func:`energon_ext.get_train_dataset`, with streamed sources.
        **options: as for ``megatron.energon.get_savable_loader``.

    Attributes:
        changes: what the last restore did with each source.

    State: of this rank alone; grows with its workers, and with the samples that wait in buffers.
    """

    def __init__(self, dataset: SavableDataset, **options: Any):
        options.setdefault("checkpoint_every_sec", 0)  # a state after every batch
        options.setdefault("checkpoint_every_min_n_samples", 1)
        self.dataset = dataset
        self.blend: StreamedBlend = find_blend(dataset)
        self.changes: list[SourceChange] = []
        self._loader: SavableDataLoader | None = SavableDataLoader(dataset, **options)
        self._drawn = 0
        self._is_restored = False

    @property
    def worker_config(self) -> WorkerConfig:
        """Of the dataset."""
        return self.dataset.worker_config

    @property
    def batches_drawn(self) -> int:
        """Batches of this rank since the beginning of the run."""
        return self._drawn

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self._opened())
        while (batch := next(batches, None)) is not None:
            self._drawn += 1
            yield batch
            self._opened()

    def _opened(self) -> SavableDataLoader:
        if self._loader is None:
            raise ConfigError("This loader was closed; make a new one and load the state.")
        return self._loader

    # State --------------------------------------------------------------------------------------

    def mark(self) -> dict[str, Any]:
        """Remember the last batch that was taken, for a later :meth:`state_dict`."""
        return self.state_dict()

    def state_dict(self, mark: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The state of this rank after the last batch, or after that of a mark, as JSON values.

        Raises:
            ConfigError: the loader was closed.
        """
        if mark is not None:
            return dict(mark)
        state = self._save() if self._drawn or self._is_restored else None
        return sealed(
            {
                "__class__": _CLASS,
                "version": _VERSION,
                "topology": self._topology(),
                "drawn": self._drawn,
                "state": to_plain(state),
            }
        )

    def _save(self) -> SavableDataLoaderState:
        loader = self._opened()
        state = loader.save_state_rank()
        # A worker that has not begun yet has no state, and its first batch would be skipped.
        while any(getattr(worker, "state", worker) is None for worker in state.worker_states):
            time.sleep(0.01)
            state = loader.save_state_rank()
        return state

    def _topology(self) -> dict[str, int]:
        config = self.worker_config
        return {
            "ranks": config.world_size,
            "workers": config.num_workers,
            "batch_size": self.blend.topology.batch_rows,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict` of this rank.

        Raises:
            StateFormatError: it is damaged, or something else.
            StateMismatchError: it belongs to another configuration, rank or number of workers.
            ConfigError: batches were drawn already, or the loader was closed.
        """
        loader = self._opened()
        if self._drawn or self._is_restored:
            raise ConfigError("Restore a data state before the first batch, in a new loader.")
        content = check_seal(state)
        advice = "It was saved with planned sources, or without this package. Finish that run as "
        check_class(content, _CLASS, _VERSION, f"{advice}it was begun, or start a new one.")
        check_shape(content, _SHAPE, "state")
        saved = from_plain(content["state"])
        if saved is None:
            return
        self._check(_workers_in(saved), content["topology"])
        loader.restore_state_rank(copy.deepcopy(saved))
        self._drawn, self._is_restored = content["drawn"], True

    def _check(self, workers: list[list[Mapping[str, Any]]], topology: Mapping[str, Any]) -> None:
        """Refuse what cannot be continued, before a worker has started.

        Args:
            workers: stages in the state of each worker, from the outermost to the blend.
        """
        stages = [str(stage["__class__"]) for stage in workers[0][:-1]]
        check_fingerprint(
            {**topology, "stages": stages},
            {**self._topology(), "stages": _stages_of(self._opened().dataset.dataset)},
            advice="A streamed run continues with the ranks, workers, batch size and buffers that "
            "saved it.",
        )
        blends = [stages[-1] for stages in workers]
        for number, blend in enumerate(blends):
            self.blend.check_state(blend, self.worker_config.rank * len(blends) + number)
        changes = compare_sources([blend["sources"] for blend in blends], self.blend.source_names)
        _check_buffers(workers, changes)
        self.changes = changes
        if self.worker_config.rank == 0:
            saved, now = blends[0]["fingerprint"], self.blend.fingerprint
            log_resume(changes, saved.get(ENCODER), now.get(ENCODER))

    def save_state_rank(self) -> dict[str, Any]:
        """:meth:`state_dict`, by the name that Energon's loader has for it."""
        return self.state_dict()

    def restore_state_rank(self, state: Mapping[str, Any] | None) -> None:
        """:meth:`load_state_dict`, by the name that Energon's loader has for it."""
        if state is not None:
            self.load_state_dict(state)

    def close(self) -> None:
        """End the worker processes at once; torch would wait five seconds for each of them."""
        loader, self._loader = self._loader, None
        iterator = getattr(loader, "_iterator", None)
        if iterator is not None:
            iterator._shutdown = True
            signal_handling._remove_worker_pids(id(iterator))  # type: ignore[attr-defined]
            iterator._worker_pids_set = False
            for worker in iterator._workers:
                worker.kill()
                worker.join()


def _workers_in(state: Any) -> list[list[Mapping[str, Any]]]:
    """For every worker of a rank the states of its stages, from the outermost to the blend.

    Raises:
        StateFormatError: it is no state of Energon's loader, or has no blend.
    """
    workers = state.worker_states if isinstance(state, SavableDataLoaderState) else None
    if not workers:
        raise StateFormatError(f"A {type(state).__name__} is no state of Energon's loader.")
    found = []
    for worker in workers:
        inner = getattr(getattr(worker, "state", None), "dataset_state", None)
        stages: list[Any] = [worker["datasets"][0] if isinstance(worker, dict) else inner]
        while isinstance(stages[-1], dict) and stages[-1].get("__class__") != STATE_CLASS:
            inside = stages[-1].get("datasets")
            stages.append(inside[0] if isinstance(inside, list) and len(inside) == 1 else None)
        if not isinstance(stages[-1], dict):
            raise StateFormatError("A data state without a blend of sources was found.")
        found.append(stages)
    return found


def _stages_of(dataset: Any) -> list[str]:
    """Classes of the datasets around a blend."""
    if isinstance(dataset, StreamedBlend):
        return []
    return [type(dataset).__name__, *_stages_of(dataset.datasets[0])]


def _check_buffers(workers: list[list[Mapping[str, Any]]], changes: list[SourceChange]) -> None:
    """Refuse to leave a source that has samples behind the draw: they are read again on a resume.

    Raises:
        StateMismatchError: names the source.
    """
    gone = {change.key for change in changes if change.change == RETAINED}
    for key in (key for stages in workers for key in _keys_behind_draw(stages[0])):
        if key in gone:
            raise StateMismatchError(
                {f"samples of {key}": ("in a buffer", "no such source")},
                "A source with samples in a shuffle or packing buffer cannot leave; keep it with "
                "`weight: 0` until they are gone.",
            )


def _keys_behind_draw(state: Any) -> Iterator[str]:
    """The source of every restore key in a state, but for those inside the blend."""
    if isinstance(state, dict) and state.get("__class__") != STATE_CLASS:
        for value in state.values():
            yield from _keys_behind_draw(value)
    elif isinstance(state, tuple) and STATE_CLASS in state[:-1]:
        yield state[state.index(STATE_CLASS) + 1]
    elif isinstance(state, (list, tuple)):
        for value in state:
            yield from _keys_behind_draw(value)
