# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Energon's own loader over a streamed blend, with the methods of :class:`ExactDataLoader`.

Its state belongs to one rank: it continues on the ranks x workers that saved it.
"""

from __future__ import annotations

import time
from typing import Any, Iterator, Mapping

from megatron.energon import SavableDataLoader
from megatron.energon.flavors.base_dataset import SavableDataset
from megatron.energon.savable_loader import SavableDataLoaderState

from energon_ext.errors import ConfigError
from energon_ext.loader.data_loader import ExactDataLoader
from energon_ext.loader.processes import deaths_named, end_workers, name_deaths_anywhere
from energon_ext.loader.resume_log import log_resume
from energon_ext.plan.dataset import PlannedDataset
from energon_ext.plan.lookup import find_blend
from energon_ext.state.match import SourceChange, check_fingerprint, compare_sources
from energon_ext.state.plain import from_plain, to_plain
from energon_ext.state.schema import COUNT, check_class, check_seal, sealed
from energon_ext.streamed.blend import STATE_CLASS, StreamedBlend

_CLASS, _VERSION = "EnergonExtStreamed", 1
_SHAPE = {"topology": {str: object}, "drawn": COUNT, "state": (None, {str: object})}


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
        worker_config: of the dataset.
        batches_drawn: of this rank since the beginning of the run.
        changes: what the last restore did with each source.

    State: of this rank alone; grows with its workers, and with the samples that wait in buffers.
    """

    def __init__(self, dataset: SavableDataset, **options: Any):
        options.setdefault("checkpoint_every_sec", 0)  # a state after every batch
        options.setdefault("checkpoint_every_min_n_samples", 1)
        self.dataset = dataset
        self.worker_config = dataset.worker_config
        self.batches_drawn = 0
        self.changes: list[SourceChange] = []
        self._blend: StreamedBlend = find_blend(dataset)
        self._loader: SavableDataLoader | None = SavableDataLoader(dataset, **options)
        self._topology = {
            "ranks": self.worker_config.world_size,
            "workers": self.worker_config.num_workers,
            "batch_size": self._blend.topology.batch_rows,
            "stages": _stages_of(self._loader.dataset.dataset),
        }

    def __iter__(self) -> Iterator[Any]:
        with deaths_named(self.worker_config.num_workers):
            batches = iter(self._opened())
            while (batch := next(batches, None)) is not None:
                name_deaths_anywhere()
                self.batches_drawn += 1
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
        """The state of this rank after the last batch, or after that of a mark, as JSON values."""
        if mark is not None:
            return dict(mark)
        return sealed(
            {
                "__class__": _CLASS,
                "version": _VERSION,
                "topology": self._topology,
                "drawn": self.batches_drawn,
                "state": to_plain(self._save() if self.batches_drawn else None),
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

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict` of this rank.

        Raises:
            StateFormatError: it is damaged, or something else.
            StateMismatchError: it belongs to another configuration, rank or number of workers.
            ConfigError: batches were drawn already, a state was loaded, or the loader was closed.
        """
        loader = self._opened()
        if self.batches_drawn:
            raise ConfigError("Restore a data state before the first batch, in a new loader.")
        content = check_seal(state)
        advice = "It was saved with planned sources, or without this package. Finish that run as "
        advice += "it was begun, or start a new one."
        check_class(content, _CLASS, _VERSION, _SHAPE, advice)
        if content["state"] is None:
            return
        advice = "A streamed run continues with the ranks, workers, batch size and buffers that "
        check_fingerprint(content["topology"], self._topology, advice=f"{advice}saved it.")
        saved = from_plain(content["state"])
        blends = [_blend_in(worker) for worker in saved.worker_states]
        for blend in blends:  # the workers themselves would refuse it at the first batch
            self._blend.check_state(blend)
        loader.restore_state_rank(saved)
        self.batches_drawn = content["drawn"]
        sources = [blend["sources"] for blend in blends]
        self.changes = compare_sources(sources, self._blend.source_names)
        if self.worker_config.rank == 0:
            log_resume(self.changes, blends[0], self._blend)

    save_state_rank = state_dict  # as Energon's loader calls it

    def restore_state_rank(self, state: Mapping[str, Any] | None) -> None:
        """:meth:`load_state_dict`, by the name that Energon's loader has for it."""
        if state is not None:
            self.load_state_dict(state)

    def close(self) -> None:
        """End the processes; save the state before."""
        end_workers(getattr(self._loader, "_iterator", None))
        self._loader = None


def _stages_of(dataset: Any) -> list[str]:
    """Classes of the datasets around a blend."""
    if isinstance(dataset, StreamedBlend):
        return []
    return [type(dataset).__name__, *_stages_of(dataset.datasets[0])]


def _blend_in(worker: Any) -> Mapping[str, Any]:
    """The state of the blend within that of a worker."""
    state: Mapping[str, Any] = worker if isinstance(worker, dict) else worker.state.dataset_state
    while state["__class__"] != STATE_CLASS:
        state = state["datasets"][0]
    return state
