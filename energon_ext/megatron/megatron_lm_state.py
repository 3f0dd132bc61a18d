# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The data state of a Megatron-LM run: one file a data-parallel rank, beside the model's."""

import argparse
import logging
import os
from pathlib import Path
from typing import Any

from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.energon.flavors.base_dataset import SavableDataset

from energon_ext.errors import StateFormatError, StateMismatchError
from energon_ext.loader.compare import names_of
from energon_ext.loader.regroup import blends_in, cursor_of, workers_of
from energon_ext.loader.seals import check_workers
from energon_ext.megatron.rerun import RerunLoader, is_inside_step
from energon_ext.state.checkpoint_folder import read_megatron_lm_state
from energon_ext.state.consumption import Consumption
from energon_ext.state.match import compare_sources
from energon_ext.state.plain import to_plain
from energon_ext.state.schema import digest_of
from energon_ext.state.together import on_all_ranks

logger = logging.getLogger(__name__)


class MegatronLMLoader(RerunLoader):
    """The loader of a Megatron-LM run, saved by Megatron-LM and restored from where it saves.

    Attributes:
        drawn: by this rank; of what was restored, the sum over all ranks is right.
    """

    def __init__(self, dataset: SavableDataset, **loader_options: Any):
        super().__init__(dataset, **loader_options)
        self.drawn = Consumption()

    def __next__(self) -> Any:
        batch = super().__next__()
        self.drawn.add_batch(batch)
        return batch

    def save_state(self) -> Any:
        """Return the state as plain containers for Megatron-LM to save, and make its folder."""
        # Until megatron-core 0.18 Megatron-LM makes the folder of data-parallel rank 0 alone, while
        # under expert parallelism each rank writes to one of its own.
        from megatron.training import get_args

        if folder := get_args().dataloader_save:
            # The machine counts every step that was begun, skipped ones too.
            iteration = get_rerun_state_machine().current_iteration - is_inside_step()
            path = _path(folder, iteration, self.loader.worker_config.rank)
            os.makedirs(os.path.dirname(path), exist_ok=True)
        return to_plain(super().save_state())

    def find_states(self, args: argparse.Namespace) -> bool:
        """Read what Megatron-LM saved with the model it has just loaded; whether there is any.

        A planned run needs the file of any rank; a streamed one its own, or those of all ranks that
        saved where their number was another one.

        Raises:
            StateFormatError: a file cannot be read, or that of a rank is missing.
        """
        folder, iteration = args.dataloader_load or args.dataloader_save, args.iteration
        worker = self.loader.worker_config
        files = _files(folder, iteration)
        if not files:
            return False
        known = worker.rank if worker.rank in files else min(files)
        self._found = [read_megatron_lm_state(files[known])]
        saved = _topology_that_saved(self._found[0])
        if saved is not None:
            is_same = saved == (worker.world_size, worker.num_workers)
            needed = [worker.rank] if is_same else range(saved[0])
            missing = [rank for rank in needed if rank not in files]
            if missing:
                raise StateFormatError(
                    f"The data state of data-parallel rank {missing[0]} at iteration {iteration} "
                    f"is missing in {_folder(folder, iteration)}. Copy it from where it was saved."
                )
            self._found = [read_megatron_lm_state(files[rank]) for rank in needed]
        return True

    def restore_found(self) -> tuple[int, str]:
        """Continue from what :meth:`find_states` has read.

        Returns: how many batches this rank has drawn; a digest of what all ranks share.

        Raises:
            StateMismatchError: it belongs to another configuration.
        """
        if len(self._found) == 1:
            self.restore_state(self._found[0])
        else:
            self.restore_states(self._found)
        self.drawn = self._drawn_before()
        shared = cursor_of(self._found[0]) if self.blend.is_shared else None
        return self.next_batch_index, digest_of(shared)

    def _drawn_before(self) -> Consumption:
        """What the states say; where all ranks have the same ones, the first counts."""
        drawn, shared = Consumption(), self.blend.is_shared
        if self.loader.worker_config.rank > 0 and (shared or len(self._found) > 1):
            return drawn
        blends = [cursor_of(self._found[0])]
        if not shared:
            blends = [blend for state in self._found for blend in blends_in(state).values()]
        for change in compare_sources(blends, names_of(self.blend)):
            drawn.add(change.key, rows=change.documents, tokens=change.tokens)
        return drawn


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
    path = _folder(folder, args.iteration) if folder else "a folder of --dataloader-save"
    if all(loading):
        drawn = on_all_ranks(lambda: None if loader is None else loader.restore_found())
        for what, each in zip(("batches drawn", "digest"), zip(*filter(None, drawn))):
            if len(set(each)) > 1:
                raise StateMismatchError(
                    {what: (sorted(set(each)), "the same on every rank")},
                    f"Data states of different saves are mixed in {folder}; take those of one.",
                )
    elif any(loading):
        raise StateFormatError(
            f"Only {sum(loading)} of {len(loading)} ranks that load find a data state of iteration "
            f"{args.iteration} ({path}). Copy what is missing, or resume elsewhere."
        )
    elif args.dataloader_load:
        raise StateFormatError(
            f"--dataloader-load {folder} holds no data state of iteration {args.iteration} "
            f"(none in {path}). Correct it, or leave it out to start the data over."
        )
    else:
        # No state is a decision of the user (a model from elsewhere); half of one is damage.
        logger.warning(
            "NO DATA STATE: the model continues from iteration %d, but %s holds none, so the "
            "data starts from its beginning and what the model has seen will be seen again. To "
            "continue the data as well, set --dataloader-load to the folder it was saved in.",
            args.iteration,
            path,
        )


def _topology_that_saved(state: Any) -> tuple[int, int] | None:
    """Data-parallel ranks and workers of a rank that private plans belong to, else None."""
    check_workers(state)
    workers, fingerprint = workers_of(state), blends_in(state)[0]["fingerprint"]
    if fingerprint.get("plan") == "shared":
        return None
    return fingerprint.get("global_workers", 0) // max(1, workers), workers


def _files(folder: str | None, iteration: int) -> dict[int, Path]:
    """The data states of an iteration by data-parallel rank."""
    if not folder:
        return {}
    # Until megatron-core 0.18 the folder of a rank is named after its expert-parallel rank as well.
    found = sorted(_folder(folder, iteration).glob("*/train_dataloader_dprank*.pt"))
    return {int(path.stem.rpartition("dprank")[2]): path for path in reversed(found)}


def _folder(folder: str, iteration: int) -> Path:
    return Path(_path(folder, iteration, 0)).parent.parent


def _path(folder: str, iteration: int, rank: int) -> str:
    """Where Megatron-LM writes the data state of a rank: on the first pipeline stage only."""
    from megatron.training.checkpointing import get_checkpoint_name

    basename = f"train_dataloader_dprank{rank:03d}.pt"
    return str(get_checkpoint_name(folder, iteration, pipeline_rank=0, basename=basename))
