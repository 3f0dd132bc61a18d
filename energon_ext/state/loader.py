# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Energon's loader, with the gaps of its state closed.

Stock ``SavableDataLoader`` saves an exact state while a run is under way. Around its start it does
not, when it has worker processes:

* A worker answers a request for its state from another thread, which may come before the worker has
  restored, or stored, its first state. The answer is then "from the very beginning", and a resume
  reads data again or skips a batch. Here such an answer is asked for again.
* A state may say "and then draw k batches again". Restoring such a state forgets k in the count of
  what was drawn (Energon 7.4.1, ``savable_loader.py`` line 1028), so that a save soon after a
  resume is k batches too early. Here the count is complete. By default no state needs to say so:
  workers store a state after every batch.

It saves and restores through the same methods, and its states are the stock ones. It also tells
what a resume does with every source, and continues a run on another number of ranks and workers.
"""

from __future__ import annotations

import logging
import time
from typing import Any, Sequence

import torch
from megatron.energon import SavableDataLoader
from megatron.energon.flavors.base_dataset import SavableDataset
from megatron.energon.savable_loader import SavableDataLoaderState, SavableDatasetWrapper
from torch.utils.data._utils import signal_handling

from energon_ext.config.source_key import global_worker
from energon_ext.errors import ConfigError, EnergonExtError
from energon_ext.splice.lookup import choices_inside, find_choice
from energon_ext.state.match import SourceChange, check_fingerprint, compare_sources
from energon_ext.state.regroup import (
    check_nothing_waits,
    choices_in,
    state_for_rank,
    workers_of,
)

logger = logging.getLogger(__name__)

#: Seconds that workers may take to start before a save gives up.
WORKER_START_SECONDS = 600.0


class ExactDataLoader(SavableDataLoader):
    """A :class:`megatron.energon.SavableDataLoader` whose state is exact from the first batch on.

    Args:
        dataset: an Energon dataset, for example of :func:`energon_ext.get_train_dataset`.
        save_every: batches of this rank between two saves, counted from the beginning of the run.
            Workers then store a state where a save will ask for one, and not after every batch. A
            save in between is exact too, but its resume makes some batches again to get there.
        **options: as for ``megatron.energon.get_savable_loader``.

    Attributes:
        changes: what the last restore did with each source.

    Raises:
        ConfigError: ``save_every`` is no integer >= 1.
    """

    def __init__(self, dataset: SavableDataset, *, save_every: int = 1, **options: Any):
        if isinstance(save_every, bool) or not isinstance(save_every, int) or save_every < 1:
            raise ConfigError(f"save_every: {save_every!r} found, an integer >= 1 is needed.")
        options.setdefault("checkpoint_every_sec", 0)
        options.setdefault("checkpoint_every_min_n_samples", 1)
        super().__init__(dataset, **options)
        self.changes: list[SourceChange] = []
        if save_every > 1 and self.num_workers > 0:
            # Stock builds its wrapper itself, and lets nobody replace it.
            self.dataset.__class__ = _StatesAtSaves
            self.dataset.save_every = save_every
        # Stock always asks for page-locked memory; torch warns where there is no GPU to copy to.
        self.pin_memory = torch.cuda.is_available()

    def save_state_rank(self) -> SavableDataLoaderState | None:
        """The state after the last batch that was drawn, None before there is any."""
        # Stock believes in workers as soon as iter() was called; they start with the first batch.
        self._has_workers = self.num_workers > 0 and self._iterator is not None
        deadline = time.monotonic() + WORKER_START_SECONDS
        while True:
            state = super().save_state_rank()
            if not self._has_workers or all(worker.state for worker in state.worker_states):
                return state
            if time.monotonic() > deadline:
                raise EnergonExtError(
                    f"A data worker did not start within {WORKER_START_SECONDS:.0f} s, so its "
                    f"state cannot be saved; see the log for what it waits for."
                )
            time.sleep(0.005)

    def restore_states(self, states: Sequence[SavableDataLoaderState]) -> None:
        """Continue a run, on any number of ranks and workers where its sources can.

        Args:
            states: of all ranks of the saved run, in their order.

        Raises:
            StateMismatchError: another configuration, or another number of ranks or workers with a
                source that only the saved number can continue.
            ConfigError: states are missing; or the dataset was built without this package's mixin.
        """
        self.restore_state_rank(self.state_of(states))

    def state_of(self, states: Sequence[SavableDataLoaderState]) -> SavableDataLoaderState:
        """The state with which this rank continues what the ranks of ``states`` did."""
        if not states or None in states:
            raise ConfigError(
                f"restore_states: {len(states)} states found, {list(states).count(None)} of them "
                "None; the states of all ranks of the saved run are needed, after a first batch."
            )
        layout = [workers_of(state) for state in states]
        if layout != [self.num_workers] * self.worker_config.world_size:
            logger.info(
                "The data of %d ranks with %s workers is dealt anew to %d ranks with %d.",
                len(states),
                layout[0],
                self.worker_config.world_size,
                self.num_workers,
            )
        return state_for_rank(states, find_choice(self.dataset))

    def restore_state_rank(self, state: SavableDataLoaderState | None) -> None:
        """Continue after the batch that ``state`` was saved after."""
        if state is not None:
            self._compare(state)
        super().restore_state_rank(state)
        if state is not None and self.num_workers > 0:
            self._worker_sample_counters = [
                -1 if worker.state is None else worker.state.sample_index + worker.offset - 1
                for worker in state.worker_states
            ]

    def _compare(self, state: SavableDataLoaderState) -> None:
        """Refuse another configuration; say what becomes of each source of this one."""
        saved_workers = {"num_workers": workers_of(state)}
        workers = {"num_workers": self.num_workers}
        for choice in choices_inside(self.dataset):
            saved = choices_in(state)
            for number, worker in saved.items():
                own = global_worker(self.worker_config, number)
                check_fingerprint(
                    {
                        **saved_workers,
                        **worker["fingerprint"],
                        "global_worker": worker["global_worker"],
                    },
                    {**workers, **choice.fingerprint, "global_worker": own},
                )
            self.changes = compare_sources(list(saved.values()), choice.names) if saved else []
            check_nothing_waits(state, self.changes)
            # The same on every rank, so one says it.
            if self.worker_config.rank == 0 and self.changes:
                lines = "\n  ".join(map(str, self.changes))
                logger.info("Resuming the data of %d sources:\n  %s", len(self.changes), lines)
        check_fingerprint(saved_workers, workers)

    def close(self) -> None:
        """End the worker processes now; torch would wait five seconds for each of them."""
        iterator, self._iterator = self._iterator, None
        if iterator is not None:
            iterator._shutdown = True
            signal_handling._remove_worker_pids(id(iterator))
            for worker in iterator._workers:
                worker.kill()
                worker.join()
        self._has_workers = False
        self._epoch_iterator = None


class _StatesAtSaves(SavableDatasetWrapper):
    """The part of the loader that lives in a worker, storing states only where a save will ask."""

    save_every: int

    def _store_checkpoint(self, force: bool = False) -> None:
        if force or self._sample_index <= 1 or self._is_due():
            super()._store_checkpoint(force=True)

    def _is_due(self) -> bool:
        """Whether a save falls between this worker's last batch and its next one."""
        workers = self.worker_config.num_workers
        next_batch = self._sample_index * workers + self._worker_id
        return next_batch // self.save_every > (next_batch - workers) // self.save_every
