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

It saves and restores through the same methods, and its states are the stock ones.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from megatron.energon import SavableDataLoader
from megatron.energon.flavors.base_dataset import SavableDataset
from megatron.energon.savable_loader import SavableDataLoaderState
from torch.utils.data._utils import signal_handling

from energon_ext.errors import EnergonExtError

#: Seconds that workers may take to start before a save gives up.
WORKER_START_SECONDS = 600.0


class ExactDataLoader(SavableDataLoader):
    """A :class:`megatron.energon.SavableDataLoader` whose state is exact from the first batch on.

    Args:
        dataset: an Energon dataset, for example of :func:`energon_ext.get_train_dataset`.
        **options: as for ``megatron.energon.get_savable_loader``.
    """

    def __init__(self, dataset: SavableDataset, **options: Any):
        options.setdefault("checkpoint_every_sec", 0)
        options.setdefault("checkpoint_every_min_n_samples", 1)
        super().__init__(dataset, **options)
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

    def restore_state_rank(self, state: SavableDataLoaderState | None) -> None:
        """Continue after the batch that ``state`` was saved after."""
        super().restore_state_rank(state)
        if state is not None and self.num_workers > 0:
            self._worker_sample_counters = [
                -1 if worker.state is None else worker.state.sample_index + worker.offset - 1
                for worker in state.worker_states
            ]

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
