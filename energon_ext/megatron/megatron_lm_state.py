# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The data state of a Megatron-LM run: one file a data-parallel rank, beside the model's."""

from __future__ import annotations

import argparse
import logging
import os
from pathlib import Path
from typing import Any

from megatron.energon.savable_loader import SavableDataLoaderState

from energon_ext.errors import StateFormatError
from energon_ext.megatron.loader import MegatronEnergonLoader
from energon_ext.state.regroup import blends_in, workers_of
from energon_ext.state.serialize import read_state_file
from energon_ext.state.together import on_all_ranks

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

    def find_states(self, args: argparse.Namespace) -> bool:
        """Read what Megatron-LM saved with the model it has just loaded; whether there is any.

        A planned run needs the file of any rank; a streamed one its own, or those of all ranks that
        saved where their number was another one.

        Raises:
            StateFormatError: a file cannot be read, or that of a rank is missing.
        """
        folder, iteration = args.dataloader_load or args.dataloader_save, args.iteration
        worker = self.loader.worker_config
        mine = _find(folder, iteration, worker.rank)
        known = mine or _find(folder, iteration, 0)
        if known is None:
            return False
        state = _read(known)
        needed = [known]
        saved = _topology_that_saved(state)
        if saved is not None and saved != (worker.world_size, worker.num_workers):
            needed = [_require(folder, iteration, rank) for rank in range(saved[0])]
        elif saved is not None:
            needed = [_require(folder, iteration, worker.rank)]
        self._found = [_read(path) for path in needed]
        return True

    def restore_found(self) -> None:
        """Continue from what :meth:`find_states` has read.

        Raises:
            StateMismatchError: it belongs to another configuration.
        """
        if len(self._found) == 1 and not self._blend.is_shared:
            self.restore_state(self._found[0])
        else:
            self.restore_states(self._found)


def restore_together(loader: MegatronLMLoader | None, args: argparse.Namespace) -> None:
    """Restore the data of all ranks, or of none; every rank calls this.

    Args:
        loader: of this rank, None where it loads nothing.

    Raises:
        StateFormatError, StateMismatchError: on all ranks, where one of them cannot continue.
    """
    found = on_all_ranks(lambda: None if loader is None else loader.find_states(args))
    loading = [each for each in found if each is not None]
    folder = args.dataloader_load or args.dataloader_save
    path = _paths(folder, args.iteration, 0)[0] if folder else "a folder of --dataloader-save"
    if all(loading):
        on_all_ranks(lambda: None if loader is None else loader.restore_found())
    elif any(loading):
        raise StateFormatError(
            f"Only {sum(loading)} of {len(loading)} ranks that load find a data state of iteration "
            f"{args.iteration} ({path}). Copy what is missing, or resume elsewhere."
        )
    elif args.dataloader_load:
        raise StateFormatError(
            f"--dataloader-load {folder} holds no data state of iteration {args.iteration} "
            f"({path} does not exist). Correct it, or leave it out to start the data over."
        )
    else:
        # No state is a decision of the user (a model from elsewhere); half of one is damage.
        logger.warning(
            "NO DATA STATE: the model continues from iteration %d, but %s does not exist, so the "
            "data starts from its beginning and what the model has seen will be seen again. To "
            "continue the data as well, set --dataloader-load to the folder it was saved in.",
            args.iteration,
            path,
        )


def _topology_that_saved(state: Any) -> tuple[int, int] | None:
    """Data-parallel ranks and workers of a rank that private plans belong to, else None."""
    if not isinstance(state, SavableDataLoaderState):
        return None
    workers = workers_of(state)
    for blend in blends_in(state).values():
        if blend["fingerprint"]["plan"] != "shared":
            return blend["fingerprint"]["global_workers"] // max(1, workers), workers
    return None


def _find(folder: str | None, iteration: int, rank: int) -> str | None:
    paths = _paths(folder, iteration, rank) if folder else []
    return next(filter(os.path.exists, paths), None)


def _require(folder: str, iteration: int, rank: int) -> str:
    path = _find(folder, iteration, rank)
    if path is None:
        raise StateFormatError(
            f"The data state of data-parallel rank {rank} at iteration {iteration} is missing: "
            f"{_paths(folder, iteration, rank)[0]}. Copy it from where it was saved."
        )
    return path


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
