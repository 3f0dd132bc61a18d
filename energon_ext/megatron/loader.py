# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The iterator over an Energon dataset that Megatron's training loops expect.

Tensor-parallel rank 0 of every pipeline stage and data-parallel rank loads data. Loading is
deterministic, so all stages of a replica get the same batch without communication.
"""

from typing import Any, Iterator, Mapping

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.rerun_state_machine import RerunMode, RerunState, get_rerun_state_machine
from megatron.energon import WorkerConfig
from megatron.energon.flavors.base_dataset import SavableDataset

from energon_ext.errors import ConfigError
from energon_ext.loader.compare import Peers
from energon_ext.loader.state_names import SavesState
from energon_ext.loader.streamed import open_loader
from energon_ext.plan.lookup import find_blend
from energon_ext.state.match import SourceChange
from energon_ext.state.together import end_together, from_first_rank


class MegatronEnergonLoader(SavesState):
    """An endless iterator over an Energon dataset, for ``--dataloader-type external``.

    A state is always saved between two batches, so a resumed run draws nothing twice.

    Args:
        dataset: an Energon dataset, for example from :func:`energon_ext.get_train_dataset`.
        **loader_options: as for :func:`~energon_ext.loader.streamed.open_loader`.

    State: JSON values. With planned sources, one cursor for the run, the same on every rank and
    valid for any number of ranks and workers; with streamed sources, the state of this rank.
    """

    def __init__(self, dataset: SavableDataset, **loader_options: Any):
        self.loader = open_loader(dataset, **loader_options)
        self.blend = find_blend(dataset)
        worker = self.loader.worker_config
        if parallel_state.model_parallel_is_initialized() and (
            worker.data_parallel_group is parallel_state.get_data_parallel_group()
        ):
            self.loader.comparison.find_peers = model_parallel_peers
        self._iterator: Iterator[Any] = iter(())

    @property
    def next_batch_index(self) -> int:
        """Per-rank index of the next batch."""
        return int(self.loader.batches_drawn)

    @property
    def planned_through(self) -> int:
        """The last step that may be planned before the next batch, for live weights."""
        return int(self.loader.planned_through)  # only planned data has it

    def __iter__(self) -> "MegatronEnergonLoader":
        return self

    def __next__(self) -> Any:
        """Draw a batch; when the dataset ends, begin its next epoch.

        If every source has a ``max_epochs``, the data-parallel ranks must draw together.

        Raises:
            DataExhaustedError: every source has reached its ``max_epochs``, here or on another
                data-parallel rank.
            ConfigError: an epoch has no batch for this rank.
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

    @property
    def ends_step(self) -> bool:
        """True if the last batch completed its step, and before the first batch of a step.

        Raises:
            ConfigError: the sources are streamed.
        """
        return self.loader.ends_step

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last batch drawn, as JSON values."""
        return self.loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a :meth:`state_dict`; call this before the first batch is drawn."""
        self.loader.load_state_dict(state)

    @property
    def changes(self) -> list[SourceChange]:
        """Effect of the last restore on each source."""
        return self.loader.changes

    def close(self) -> None:
        """Stop the worker processes."""
        self.loader.close()


def draw_step(loader: MegatronEnergonLoader | None) -> tuple[list[Any] | None, int]:
    """Draw the micro-batches of the rest of a step, and return them and their number.

    The steps of a layout differ in their numbers of micro-batches, which Megatron's schedules need
    to know. All ranks call this together.

    Args:
        loader: on tensor-parallel rank 0; None on other ranks.

    Returns:
        The micro-batches, None on other ranks; and their number on every rank. With pipeline stages
        all stages draw the same.

    Raises:
        ConfigError: tensor-parallel rank 0 has no loader.
        DataExhaustedError: as the loader.
    """
    drawn: list[Any] = []

    def draw() -> int:
        if loader is None:
            raise ConfigError(
                "draw_step: tensor-parallel rank 0 has no loader, but loads the data."
            )
        drawn.append(next(loader))
        while not loader.ends_step:
            drawn.append(next(loader))
        return len(drawn)

    group = parallel_state.get_tensor_model_parallel_group()
    if dist.get_world_size(group) == 1:
        return drawn, draw()
    count = from_first_rank(draw, group)
    return drawn or None, count


class RerunLoader(MegatronEnergonLoader):
    """A loader whose state, if saved during a step, is the state before that step.

    Megatron-LM and Megatron-Bridge rerun suspicious steps: if the result is rejected twice, they
    save the model from before the step and exit, so that another process can rerun it.
    """

    _step = -1
    _before_step: Any = None

    def __next__(self) -> Any:
        machine = get_rerun_state_machine()
        is_validating = machine.get_mode() == RerunMode.VALIDATE_RESULTS
        if is_validating and machine.current_iteration != self._step:
            self._step, self._before_step = machine.current_iteration, self.loader.mark()
        return super().__next__()

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last completed step."""
        if is_inside_step() and self._before_step is not None:
            return dict(self.loader.state_dict(self._before_step))
        return super().state_dict()


def is_inside_step() -> bool:
    """True if the loop has begun a step but not completed it."""
    return bool(get_rerun_state_machine().state != RerunState.NOT_RUNNING_YET)


def model_parallel_peers() -> Peers | None:
    """Return the ranks that must plan the same as this one, which loads data.

    All data-parallel and context-parallel ranks of a pipeline stage draw their first batch
    independently. A later stage draws it after the first stage, which must not wait for it.
    """
    ranks = dist.get_process_group_ranks(
        parallel_state.get_data_parallel_group(with_context_parallel=True)
    )
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        return Peers(ranks, parallel_state.get_pipeline_model_parallel_first_rank())
    return Peers(ranks) if len(ranks) > 1 else None


def data_parallel_worker_config(num_workers: int, seed: int = 0) -> WorkerConfig:
    """Return Energon's view of this rank: one shard of the data per data-parallel rank."""
    return WorkerConfig(
        rank=parallel_state.get_data_parallel_rank(),
        world_size=parallel_state.get_data_parallel_world_size(),
        num_workers=num_workers,
        data_parallel_group=parallel_state.get_data_parallel_group(),
        seed_offset=seed,
    )
