# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The data state of a Megatron-LM run: one file a data-parallel rank, beside the model's."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.energon.savable_loader import SavableDataLoaderState

from energon_ext.errors import StateFormatError
from energon_ext.megatron.loader import MegatronEnergonLoader
from energon_ext.state.regroup import choices_in, workers_of
from energon_ext.state.serialize import read_state_file

logger = logging.getLogger(__name__)


class MegatronLMLoader(MegatronEnergonLoader):
    """The loader of a Megatron-LM run, saved by Megatron-LM and restored from where it saves."""

    def save_state(self) -> SavableDataLoaderState | None:
        """Return the state for Megatron-LM to save, and see to it that it can."""
        # Until megatron-core 0.18 Megatron-LM makes the folder of data-parallel rank 0 alone, while
        # under expert parallelism each rank writes to one of its own.
        from megatron.training import get_args

        args = get_args()
        if args.dataloader_save and getattr(args, "curr_iteration", None) is not None:
            rank = self.loader.worker_config.rank
            path = _paths(args.dataloader_save, args.curr_iteration + 1, rank)[-1]
            os.makedirs(os.path.dirname(path), exist_ok=True)
        return super().save_state()

    def restore_from(self, args) -> None:
        """Restore what Megatron-LM saved with the model it has just loaded.

        Where another number of data-parallel ranks or workers saved it, the data is dealt anew.

        Raises:
            StateFormatError: a data state cannot be read, or that of a rank is missing, or all of
                them where ``--dataloader-load`` names a folder.
            StateMismatchError: it belongs to another configuration, or a source cannot be dealt
                anew.
        """
        folder = args.dataloader_load or args.dataloader_save
        worker = self.loader.worker_config
        mine = _find(folder, args.iteration, worker.rank)
        known = mine or _find(folder, args.iteration, 0)
        now = (worker.world_size, worker.num_workers)
        saved = _layout_that_saved(_read(known), now) if known else now
        # Where nothing has changed every rank needs its own state alone.
        needed = [worker.rank] if saved == now else range(saved[0])
        paths = [_find(folder, args.iteration, rank) for rank in needed]
        if _count_over_data_parallel(known is not None) == 0:
            if args.dataloader_load:
                raise StateFormatError(
                    f"--dataloader-load {folder} holds no data state of iteration {args.iteration} "
                    f"({_paths(folder, args.iteration, worker.rank)[0]} does not exist). Correct "
                    "it, or leave it out to start the data over."
                )
            # No state is a decision of the user (a model from elsewhere); half of one is damage.
            logger.warning(
                "NO DATA STATE: the model continues from iteration %d, but %s does not exist, so "
                "the data starts from its beginning and what the model has seen will be seen again."
                " To continue the data as well, set --dataloader-load to the folder it was saved "
                "in.",
                args.iteration,
                _paths(folder, args.iteration, worker.rank)[0]
                if folder
                else "a folder given by --dataloader-save",
            )
            return
        found = _count_over_data_parallel(None not in paths)
        if found != worker.world_size:
            raise StateFormatError(
                f"Only {found} of {worker.world_size} data-parallel ranks find the data state of "
                f"iteration {args.iteration} that they need (here: {paths}). Copy what is missing, "
                "or resume elsewhere."
            )
        if saved == now:
            self.restore_state(_read(mine))
        else:
            self.restore_states([_read(path) for path in paths])


def _layout_that_saved(state: Any, now: tuple[int, int]) -> tuple[int, int]:
    """Data-parallel ranks and workers of a rank of the saved run; ``now``, where nothing says."""
    if not isinstance(state, SavableDataLoaderState):
        return now
    workers = workers_of(state)
    for choice in choices_in(state).values():
        return choice["fingerprint"]["global_workers"] // max(1, workers), workers
    return now


def _find(folder: str | None, iteration: int, rank: int) -> str | None:
    paths = _paths(folder, iteration, rank) if folder else []
    return next(filter(os.path.exists, paths), None)


def _read(path: str) -> Any:
    saved = read_state_file(Path(path), record=None)  # Megatron-LM keeps no checksums
    if not isinstance(saved, dict) or "dataloader_state_dict" not in saved:
        raise StateFormatError(
            f"{path} holds no dataloader_state_dict, so Megatron-LM did not write it there; set "
            "--dataloader-load to the folder that --dataloader-save was."
        )
    return saved["dataloader_state_dict"]


def _paths(folder: str, iteration: int, rank: int) -> list[str]:
    """Where Megatron-LM may have written the data state of a rank, the latest habit first."""
    from megatron.training.checkpointing import get_checkpoint_name

    # Megatron-LM saves on the first pipeline stage only; every stage loads that file.
    place = {"pipeline_rank": 0, "basename": f"train_dataloader_dprank{rank:03d}.pt"}
    # Until megatron-core 0.18 the folder was named after the expert-parallel rank as well.
    without_experts = {"expert_parallel": False, "expert_rank": 0}
    return [
        get_checkpoint_name(folder, iteration, **place, **without_experts),
        get_checkpoint_name(folder, iteration, **place),
    ]


def _count_over_data_parallel(here: bool) -> int:
    device = torch.cuda.current_device() if torch.cuda.is_available() else "cpu"
    count = torch.tensor(int(here), device=device)
    torch.distributed.all_reduce(count, group=parallel_state.get_data_parallel_group())
    return int(count)
