# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""From an Energon dataset to the iterator that Megatron's training loops want.

Tensor-parallel rank 0 of every pipeline stage and data-parallel rank loads. Loading is
deterministic, so all stages of a replica hold the same batch without communication.
"""

from typing import Any, Iterator, Mapping

from megatron.core import parallel_state
from megatron.core.rerun_state_machine import RerunMode, RerunState, get_rerun_state_machine
from megatron.energon import WorkerConfig
from megatron.energon.flavors.base_dataset import SavableDataset

from energon_ext.errors import ConfigError
from energon_ext.loader.streamed import open_loader
from energon_ext.plan.lookup import find_blend
from energon_ext.state.match import SourceChange
from energon_ext.state.together import end_together


class MegatronEnergonLoader:
    """An endless iterator over an Energon dataset, as ``--dataloader-type external`` expects it.

    A state stands exactly between two batches, so a resume draws nothing twice.

    Args:
        dataset: an Energon dataset, for example of :func:`energon_ext.get_train_dataset`.
        **loader_options: as for :func:`~energon_ext.loader.streamed.open_loader`.

    State: JSON values. With planned sources it is one cursor for the run, the same on every rank,
    and continues on any ranks and workers; with streamed ones it belongs to this rank.
    """

    def __init__(self, dataset: SavableDataset, **loader_options: Any):
        self.loader = open_loader(dataset, **loader_options)
        self.blend = find_blend(dataset)
        self._iterator: Iterator[Any] = iter(())

    @property
    def next_batch_index(self) -> int:
        """Per-rank index of the batch that comes next."""
        return int(self.loader.batches_drawn)

    def __iter__(self) -> "MegatronEnergonLoader":
        return self

    def __next__(self) -> Any:
        """Draw a batch; where the dataset ends, begin its next epoch.

        Raises:
            DataExhaustedError: every source has reached its ``max_epochs``, here or on another
                data-parallel rank; where all have one, the ranks draw together.
            ConfigError: an epoch holds no batch on this rank.
        """
        index = self.next_batch_index
        batch = next(self._iterator, None)
        if batch is None:
            self._iterator = iter(self.loader)
            batch = next(self._iterator, None)
        worker, limits = self.loader.worker_config, self.blend.epoch_limits
        if limits:
            is_planned = self.blend.is_planned
            end_together(batch is not None, limits, index, worker, is_planned=is_planned)
        elif batch is None:
            raise ConfigError(
                f"The dataset has no batch for data-parallel rank {worker.rank} of "
                f"{worker.world_size}: use fewer ranks or workers, or a smaller batch."
            )
        return batch

    def state_dict(self) -> dict[str, Any]:
        """The state after the last batch drawn, as JSON values."""
        return self.loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict`, before the first batch is drawn."""
        self.loader.load_state_dict(state)

    def save_state(self) -> dict[str, Any]:
        """:meth:`state_dict`, by the name that Megatron's loops have for it."""
        return self.state_dict()

    def restore_state(self, state: Mapping[str, Any] | None) -> None:
        """:meth:`load_state_dict`, by the name that Megatron's loops have for it."""
        if state is not None:
            self.load_state_dict(state)

    @property
    def changes(self) -> list[SourceChange]:
        """The effect of the last restore on each source."""
        return self.loader.changes

    def close(self) -> None:
        """End the worker processes."""
        self.loader.close()


class RerunLoader(MegatronEnergonLoader):
    """A loader whose state, if saved within a step, is the one before that step.

    Megatron-LM and Megatron-Bridge run doubtful steps again: where the result is rejected twice,
    they save the model before the step and end, to run it again in another process.
    """

    _step = -1
    _before_step: Any = None

    def __next__(self) -> Any:
        machine = get_rerun_state_machine()
        validates = machine.get_mode() == RerunMode.VALIDATE_RESULTS
        if validates and machine.current_iteration != self._step:
            self._step, self._before_step = machine.current_iteration, self.loader.mark()
        return super().__next__()

    def save_state(self) -> dict[str, Any]:
        """The state after the last step that was taken."""
        if is_inside_step() and self._before_step is not None:
            return self.loader.state_dict(self._before_step)
        return super().save_state()


def is_inside_step() -> bool:
    """True if the loop has begun a step but not completed it."""
    return bool(get_rerun_state_machine().state != RerunState.NOT_RUNNING_YET)


def data_parallel_worker_config(num_workers: int, seed: int = 0) -> WorkerConfig:
    """Return Energon's view of this rank: one shard of the data per data-parallel rank."""
    return WorkerConfig(
        rank=parallel_state.get_data_parallel_rank(),
        world_size=parallel_state.get_data_parallel_world_size(),
        num_workers=num_workers,
        data_parallel_group=parallel_state.get_data_parallel_group(),
        seed_offset=seed,
    )
