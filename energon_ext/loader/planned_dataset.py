# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""A planned run as an Energon dataset, whose samples are the batches of one rank.

:class:`~energon_ext.ExactDataLoader` draws the plan in one process and reads its rows in others.
Energon's own loader can iterate the dataset, too: each of its workers then draws the whole plan and
reads the batches whose turn it is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Iterator

from megatron.energon import WorkerConfig
from megatron.energon.flavors.base_dataset import SavableDataset
from megatron.energon.state import FlexState
from torch.utils.data import get_worker_info

from energon_ext.errors import ConfigError, log_of
from energon_ext.loader.reader import BatchReader
from energon_ext.plan.cursor import restore_cursor, save_cursor
from energon_ext.plan.length import batches_in_pass
from energon_ext.plan.progress import Round
from energon_ext.plan.remarks import describe_short_sources, describe_subsets
from energon_ext.plan.run import Run
from energon_ext.state.schema import check_seal, seal

logger = log_of(__name__)


class PlannedDataset(SavableDataset):
    """Yields the batches of one rank.

    Args:
        run: what is read, and how much of it has been.
        batches: reads it.
        worker_config: configuration of Energon.

    State: one cursor for the run, see :mod:`energon_ext.plan.cursor`.
    """

    def __init__(self, run: Run, batches: BatchReader, *, worker_config: WorkerConfig):
        super().__init__(worker_config=worker_config)
        self.worker_config: WorkerConfig
        self.run, self.batches = run, batches
        self._stream: Iterator[Round] | None = None
        self._has_begun = False

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of this worker of Energon's own loader in one pass."""
        self._check_workers()
        worker, workers = self.worker_config.rank_worker_id(), self.run.topology.workers
        if self.run.topology.in_layouts and workers > 1:
            raise ConfigError(
                "contexts: Energon's own loader cannot read them with several workers, which take "
                "turns by the number of a batch; use energon_ext.ExactDataLoader."
            )
        if self._stream is None:
            self.begin()
            self._stream = self.run.rounds(self.run.draw_own_steps())
        for round_ in self._stream:
            is_own = self.run.batches_read % workers == worker
            is_last = self.hand_out(round_)
            if is_own:
                yield self.batches.read(round_.batch)
            if is_last:
                break
        else:
            self._stream = None
        self.end_pass()

    def _check_workers(self) -> None:
        """Raise ConfigError if a loader has other workers than this dataset was built for."""
        info, expected = get_worker_info(), self.worker_config.num_workers
        found = 0 if info is None else info.num_workers
        # A single worker may be the process itself.
        if found != expected and (found, expected) != (0, 1):
            raise ConfigError(
                f"num_workers: the loader has {found}, but the dataset was built with "
                f"WorkerConfig(num_workers={expected}); use the same number in both, or a "
                f"MapStyleDataset, which any loader may read."
            )

    def begin(self) -> None:
        """Reset the plan to the progress: it may be ahead, or be drawn by another process."""
        self._stream = None
        self.run.rewind()
        if self._is_first_reader and not self._has_begun:
            for line in describe_short_sources(self.run):
                logger.warning(line)
            for line in describe_subsets(self.run):
                logger.info(line)
        self._has_begun = True

    def move_to(self, rank: int, ranks: int) -> None:
        """Become the dataset of another data-parallel rank; its group, if any, is left."""
        worker: WorkerConfig = self.worker_config
        self.worker_config = dataclasses.replace(
            worker, rank=rank, world_size=ranks, data_parallel_group=None
        )

    @property
    def _is_first_reader(self) -> bool:
        return self.worker_config.rank == 0 and self.worker_config.rank_worker_id() == 0

    def hand_out(self, round_: Round) -> bool:
        """Advance the progress by a round, and log it; return whether the pass ends with it."""
        is_last = self.run.hand_out(round_)
        if self._is_first_reader:
            self._log(round_)
        return is_last

    def _log(self, round_: Round) -> None:
        if round_.skipped:
            first, last = round_.skipped[0].number, round_.skipped[-1].number
            logger.info("Steps %d to %d are skipped, as set in the metadataset.", first, last)
        step = round_.completes
        if step is None:
            return
        for key in step.ended:
            limit = self.run.sources[key].max_epochs
            logger.info("%s: read to its end (max_epochs: %s) in step %d.", key, limit, step.number)

    def end_pass(self) -> None:
        """Start again with the first row if passes restart."""
        if self.run.options.restarts:
            self.reset_state_own()

    # Energon's dataset interface ----------------------------------------------------------------

    def reset_state_own(self) -> None:
        self._stream = None
        self.run.restart()

    def set_skip_mode(self, active: bool) -> None:
        """Do nothing: the next Energon may ask for less work on batches that it will drop."""

    def len_rank(self) -> int:
        """Return the batches of this rank in a pass; TypeError if it is endless."""
        if self.run.topology.in_layouts:
            raise TypeError(
                "The steps of layouts have different numbers of batches, so there is no length."
            )
        batches = batches_in_pass(self.run)
        if batches is None:
            raise TypeError(
                "An endless dataset has no length; pass a virtual_epoch_length or repeat=False, or "
                "limit every source by max_epochs."
            )
        return batches

    def len_worker(self, worker_idx: int | None = None) -> int:
        workers = self.run.topology.workers
        worker = self.worker_config.rank_worker_id() if worker_idx is None else worker_idx
        return len(range(worker, self.len_rank(), workers))

    def worker_has_samples(self) -> bool:
        return True

    def assert_can_restore(self) -> None:
        raise NotImplementedError("Batches of a plan have no restore keys.")

    def restore_sample(self, restore_key: tuple[Any, ...]) -> Any:
        self.assert_can_restore()

    def config(self) -> dict[str, Any]:
        return {
            "type": type(self).__qualname__,
            "sources": list(self.run.sources),
            "worker_config": self.worker_config.config(),
        }

    def save_state(self) -> FlexState:
        """Return the cursor after the last batch of this worker of Energon's own loader."""
        state = save_cursor(self.run)
        if self.worker_config.num_workers:
            state["inside"] = self.run.worker_settings
        return FlexState(state)

    def state_dict(self) -> dict[str, Any]:
        """Return :meth:`save_state` with its digest; torchdata's loaders call this."""
        return seal(self.save_state())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict`, without reading anything again."""
        self.restore_state(check_seal(state))

    def restore_state(self, state: Any) -> None:
        """Continue from a cursor; see :func:`~energon_ext.plan.cursor.restore_cursor`."""
        self._stream = None
        restore_cursor(self.run, state)
