# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""From an Energon dataset to the iterator that Megatron's training loops want.

Which ranks load: tensor-parallel rank 0 of every pipeline stage and data-parallel rank. Loading is
deterministic, so all stages of a replica hold the same batch without talking to each other, and one
stage's state is every stage's.
"""

import copy
from typing import Any, Iterator, Mapping, Sequence

from megatron.core import parallel_state
from megatron.energon import WorkerConfig
from megatron.energon.flavors.base_dataset import SavableDataset
from megatron.energon.savable_loader import SavableDataLoaderState

from energon_ext.errors import ConfigError
from energon_ext.loader.data_loader import ExactDataLoader
from energon_ext.plan.lookup import find_blend
from energon_ext.state.exhaustion import end_together
from energon_ext.state.match import SourceChange


class MegatronEnergonLoader:
    """An endless iterator over an Energon dataset, as ``--dataloader-type external`` expects it.

    A state stands exactly between two batches, so a resume draws nothing twice.

    Args:
        dataset: an Energon dataset, for example of :func:`energon_ext.get_train_dataset`.
        **loader_options: as for :class:`~energon_ext.loader.data_loader.ExactDataLoader`.

    State: the stock ``SavableDataLoaderState`` of this data-parallel rank. It depends on the
    dataset's configuration, the rank, the world size and the number of workers.
    """

    def __init__(self, dataset: SavableDataset, **loader_options: Any):
        self.loader = ExactDataLoader(dataset, **loader_options)
        self.blend = find_blend(dataset)
        self._iterator: Iterator[Any] | None = None

    @property
    def next_batch_index(self) -> int:
        """Per-rank index of the batch that comes next; what weight schedules are evaluated at."""
        return self.loader.batches_drawn

    def __iter__(self) -> "MegatronEnergonLoader":
        return self

    def __next__(self) -> Any:
        """Draw a batch; where the dataset ends, begin its next epoch.

        Where every source has a ``max_epochs``, the data-parallel ranks call this together: the
        first that has no batch left ends the run for all of them.

        Raises:
            DataExhaustedError: every source has reached its limit, here or on another rank.
            ConfigError: an epoch holds no batch on this rank.
        """
        index = self.next_batch_index
        batch = self._draw()
        worker, limits = self.loader.worker_config, self.blend.epoch_limits
        if limits:
            is_shared = self.blend.is_shared
            end_together(batch is not None, limits, index, worker, is_shared=is_shared)
        elif batch is None:
            raise ConfigError(
                f"The dataset has no batch for data-parallel rank {worker.rank} of "
                f"{worker.world_size}: use fewer ranks or workers, or a smaller batch."
            )
        return batch

    def _draw(self) -> Any:
        batch = next(self._iterator, None) if self._iterator is not None else None
        if batch is None:
            self._iterator = iter(self.loader)
            batch = next(self._iterator, None)
        return batch

    def save_state(self) -> SavableDataLoaderState | None:
        """Return the state after the last batch drawn; None before workers drew the first."""
        return copy.deepcopy(self.loader.save_state_rank())

    def state_dict(self) -> dict[str, Any]:
        """The cursor of a planned run: JSON values, the same on every rank.

        Raises:
            ConfigError: a source is streamed; use :meth:`save_state` on every rank.
        """
        return self.loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict`, on any ranks and workers.

        Raises:
            StateFormatError, StateMismatchError: the state is damaged, or of another run.
            ConfigError: this loader has drawn batches already, or a source is streamed.
        """
        self._check_unbegun()
        self.loader.load_state_dict(state)

    @property
    def changes(self) -> list[SourceChange]:
        """What the last restore did with each source."""
        return self.loader.changes

    def restore_states(self, states: Sequence[SavableDataLoaderState]) -> None:
        """Continue a run, perhaps on other data-parallel ranks and workers.

        Args, Raises: as of :meth:`energon_ext.ExactDataLoader.restore_states`.
        """
        self._check_unbegun()
        # Energon keeps references into a state it is given, and it may be restored again.
        self.loader.restore_state_rank(copy.deepcopy(self.loader.state_of(states)))

    def restore_state(self, state: SavableDataLoaderState | None) -> None:
        """Continue after the batch that ``state`` was saved after.

        The state of any rank continues a planned run, on any ranks and workers.

        Raises:
            StateFormatError: ``state`` is damaged, or something else.
            StateMismatchError: saved with another configuration; names every field that differs.
            ConfigError: this loader has drawn batches already.
        """
        if state is not None and self.blend.is_shared:
            self.restore_states([state])
        else:
            self._check_unbegun()
            self.loader.restore_state_rank(copy.deepcopy(state))

    def _check_unbegun(self) -> None:
        if self._iterator is not None:
            raise ConfigError("Restore a data state before the first batch, in a new loader.")

    def close(self) -> None:
        """End the worker processes."""
        self.loader.close()


def data_parallel_worker_config(num_workers: int, seed: int = 0) -> WorkerConfig:
    """Return Energon's view of this rank: one shard of the data per data-parallel rank."""
    return WorkerConfig(
        rank=parallel_state.get_data_parallel_rank(),
        world_size=parallel_state.get_data_parallel_world_size(),
        num_workers=num_workers,
        data_parallel_group=parallel_state.get_data_parallel_group(),
        seed_offset=seed,
    )
