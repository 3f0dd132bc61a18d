# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The data state of a Megatron-LM run: one file per data-parallel rank, beside the model's."""

import argparse
import os
from pathlib import Path
from typing import Any

from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.energon.flavors.base_dataset import SavableDataset

from energon_ext.errors import StateFormatError, StateMismatchError, log_of
from energon_ext.megatron.loader import RerunLoader, is_inside_step
from energon_ext.state.checkpoint_folder import read_megatron_lm_state
from energon_ext.state.consumption import Consumption
from energon_ext.state.schema import digest_of
from energon_ext.state.together import on_all_ranks

logger = log_of(__name__)


class MegatronLMLoader(RerunLoader):
    """The loader of a Megatron-LM run, saved by Megatron-LM and restored from where it saves."""

    def __init__(self, dataset: SavableDataset, **loader_options: Any):
        super().__init__(dataset, **loader_options)
        self.drawn = Consumption()  # of what was restored, the sum over all ranks is right

    def __next__(self) -> Any:
        batch = super().__next__()
        self.drawn.add_batch(batch)
        return batch

    def save_state(self) -> dict[str, Any]:
        """Return the state for Megatron-LM to save, and see to it that it can."""
        # Until megatron-core 0.18 Megatron-LM makes the folder of data-parallel rank 0 alone, while
        # under expert parallelism each rank writes to one of its own.
        from megatron.training import get_args

        if folder := get_args().dataloader_save:
            # The machine counts every step that was begun, skipped ones too.
            iteration = get_rerun_state_machine().current_iteration - is_inside_step()
            path = _path(folder, iteration, self.loader.worker_config.rank)
            os.makedirs(os.path.dirname(path), exist_ok=True)
        return super().save_state()

    def find_state(self, args: argparse.Namespace) -> bool:
        """Read what Megatron-LM saved with the model it has just loaded; whether there is any.

        A planned run needs the file of any rank, a streamed one its own.
        """
        folder, iteration = args.dataloader_load or args.dataloader_save, args.iteration
        rank, files = self.loader.worker_config.rank, _files(folder, iteration)
        if not files:
            return False
        if rank not in files and not self.blend.is_planned:
            raise StateFormatError(
                f"The data state of data-parallel rank {rank} at iteration {iteration} is missing "
                f"in {_folder(folder, iteration)}. Copy it from where it was saved."
            )
        self._found = read_megatron_lm_state(files.get(rank, files[min(files)]))
        return True

    def restore_found(self) -> tuple[int, str]:
        """Continue from it; the batches this rank has drawn, and a digest of what all share."""
        self.restore_state(self._found)
        # Where all ranks have the same state, the first counts.
        if self.loader.worker_config.rank == 0 or not self.blend.is_planned:
            for change in self.changes:
                self.drawn.add(change.key, rows=change.documents, tokens=change.tokens)
        return self.next_batch_index, digest_of(self._found if self.blend.is_planned else None)


def restore_together(loader: MegatronLMLoader | None, args: argparse.Namespace) -> None:
    """Restore the data of all ranks, or of none; every rank calls this, and all raise alike."""
    found = on_all_ranks(lambda: None if loader is None else loader.find_state(args))
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
    """Path of a rank's data state in Megatron-LM, which the first pipeline stage writes."""
    from megatron.training.checkpointing import get_checkpoint_name

    basename = f"train_dataloader_dprank{rank:03d}.pt"
    return str(get_checkpoint_name(folder, iteration, pipeline_rank=0, basename=basename))
