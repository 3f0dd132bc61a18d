# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Energon's own loader for a streamed blend, with the methods of :class:`ExactDataLoader`.

Its state belongs to one rank, and only continues with the same number of ranks and workers.
"""

from __future__ import annotations

import itertools
import time
from typing import Any, Iterator, Mapping

from megatron.energon import SavableDataLoader
from megatron.energon.flavors.base_dataset import SavableDataset
from megatron.energon.savable_loader import SavableDataLoaderState

from energon_ext.compat import end_workers
from energon_ext.errors import ConfigError
from energon_ext.loader.compare import Comparison
from energon_ext.loader.data_loader import ExactDataLoader
from energon_ext.loader.fork import WorkerContext
from energon_ext.loader.processes import explain_deaths, explain_deaths_in_signals
from energon_ext.loader.resume_log import log_resume
from energon_ext.loader.state_names import SavesState
from energon_ext.plan.lookup import find_blend, stages_in
from energon_ext.state.match import SourceChange, check_fingerprint, compare_sources
from energon_ext.state.plain import from_plain, to_plain
from energon_ext.state.schema import COUNT, check_class, check_seal, seal
from energon_ext.streamed.blend import STATE_CLASS, StreamedBlend

_CLASS, _VERSION = "EnergonExtStreamed", 1
_SHAPE = {"topology": {str: object}, "drawn": COUNT, "state": (None, {str: object})}
_OTHER_LOADER = (
    "It was saved with planned sources, or without this package. Finish that run with its original "
    "setup, or start a new one."
)
_SAME_TOPOLOGY = "A streamed run needs the ranks, workers, batch size and buffers that saved it."


def open_loader(dataset: SavableDataset, **options: Any) -> Any:
    """Return the loader for a dataset: exact for a planned one, Energon's for a streamed one.

    Args:
        **options: options of :class:`~energon_ext.ExactDataLoader` or of
            ``megatron.energon.get_savable_loader``.
    """
    if find_blend(dataset).is_planned:
        return ExactDataLoader(dataset, **options)
    return StreamedLoader(dataset, **options)


class StreamedLoader(SavesState):
    """Iterates a streamed dataset.

    A resume is exact at every batch, with two limits of Energon's loader. Without workers, it does
    not save the random states of torch, numpy and random, which an encoder may use. With several
    workers, a virtual epoch is exact only if saved after a multiple of ``num_workers`` batches.

    Args:
        dataset: dataset of :func:`energon_ext.get_train_dataset` with streamed sources.
        compare_ranks: as for :class:`~energon_ext.ExactDataLoader`.
        **options: as for ``megatron.energon.get_savable_loader``.

    Attributes:
        comparison: made before the first batch.
        worker_config: the worker configuration of the dataset.
        batches_drawn: batches of this rank since the start of the run.
        changes: effect of the restore on each source.

    State: for this rank only; grows with its workers and with the samples in buffers.
    """

    def __init__(self, dataset: SavableDataset, *, compare_ranks: bool = True, **options: Any):
        options.setdefault("checkpoint_every_sec", 0)  # a state after every batch
        options.setdefault("checkpoint_every_min_n_samples", 1)
        self.dataset = dataset
        self.worker_config = dataset.worker_config
        self.comparison = Comparison(self.worker_config, compare_ranks)
        self.batches_drawn = 0
        self.changes: list[SourceChange] = []
        self._blend: StreamedBlend = find_blend(dataset)
        self._loader: SavableDataLoader | None = SavableDataLoader(dataset, **options)
        if self.worker_config.num_workers:
            self._loader.multiprocessing_context = WorkerContext()
        self._topology = {
            "ranks": self.worker_config.world_size,
            "workers": self.worker_config.num_workers,
            "batch_size": self._blend.topology.batch_rows,
            "stages": _stages_of(self._loader.dataset.dataset),
        }

    def __iter__(self) -> Iterator[Any]:
        self.comparison.run(self._blend, place={"batches": self.batches_drawn})
        with explain_deaths(self.worker_config.num_workers):
            for batch in self._get_loader():
                explain_deaths_in_signals()
                if batch is None:
                    raise ConfigError(
                        "The TaskEncoder's encode_batch returned None; return every batch."
                    )
                self.batches_drawn += 1
                yield batch
                self._get_loader()

    def _get_loader(self) -> SavableDataLoader:
        if self._loader is None:
            raise ConfigError("This loader was closed; create a new one and load the state.")
        return self._loader

    @property
    def ends_step(self) -> bool:
        raise ConfigError("ends_step: the batches of streamed sources do not belong to steps.")

    # State --------------------------------------------------------------------------------------

    def mark(self) -> dict[str, Any]:
        """Mark the last batch that was taken, for a later :meth:`state_dict`."""
        return self.state_dict()

    def state_dict(self, mark: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the state of this rank after the last or the marked batch, as JSON values."""
        if mark is not None:
            return dict(mark)
        return seal(
            {
                "__class__": _CLASS,
                "version": _VERSION,
                "topology": self._topology,
                "drawn": self.batches_drawn,
                "state": to_plain(self._save() if self.batches_drawn else None),
            }
        )

    def _save(self) -> SavableDataLoaderState:
        loader = self._get_loader()
        state = loader.save_state_rank()
        # A worker that has not started has no state yet, and its first batch would be lost.
        while any(getattr(worker, "state", worker) is None for worker in state.worker_states):
            time.sleep(0.01)
            state = loader.save_state_rank()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict` of this rank.

        Raises:
            StateFormatError: the state is damaged, or not a data state.
            StateMismatchError: it belongs to another configuration, rank or number of workers.
            ConfigError: batches were already drawn, a state was loaded, or the loader was closed.
        """
        loader = self._get_loader()
        if self.batches_drawn:
            raise ConfigError("Restore a data state before the first batch, in a new loader.")
        content = check_seal(state)
        check_class(content, _CLASS, _VERSION, _SHAPE, _OTHER_LOADER)
        if content["state"] is None:
            return
        check_fingerprint(content["topology"], self._topology, advice=_SAME_TOPOLOGY)
        saved = from_plain(content["state"])
        blends = [_blend_in(worker) for worker in saved.worker_states]
        for blend in blends:  # otherwise a worker would reject it at the first batch
            self._blend.check_state(blend)
        loader.restore_state_rank(saved)
        self.batches_drawn = content["drawn"]
        sources = [blend["sources"] for blend in blends]
        self.changes = compare_sources(sources, self._blend.source_names)
        if self.worker_config.rank == 0:
            log_resume(self.changes, blends[0], self._blend)

    def close(self) -> None:
        """End the processes; save the state first."""
        if self._loader is not None:
            end_workers(self._loader)
        self._loader = None


def _stages_of(dataset: Any) -> list[str]:
    """Return the class names of the datasets wrapped around a blend."""
    stages = stages_in(dataset)
    around = itertools.takewhile(lambda stage: not isinstance(stage, StreamedBlend), stages)
    return [type(stage).__name__ for stage in around]


def _blend_in(worker: Any) -> Mapping[str, Any]:
    """Return the state of the blend within the state of a worker."""
    state: Mapping[str, Any] = worker if isinstance(worker, dict) else worker.state.dataset_state
    while state["__class__"] != STATE_CLASS:
        state = state["datasets"][0]
    return state
