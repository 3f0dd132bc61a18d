# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The data state of a Megatron-LM run: one file per data-parallel rank, next to the model's."""

import argparse
import os
from pathlib import Path
from typing import Any

from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.energon.flavors.base_dataset import SavableDataset

from energon_ext.batch.packed_batch import PackedBatch
from energon_ext.batch.row_hashes import NUM_PARTS, StepHash
from energon_ext.errors import ConfigError, StateFormatError, StateMismatchError, log_of
from energon_ext.megatron.loader import RerunLoader, is_inside_step
from energon_ext.state.checkpoint_folder import read_megatron_lm_state
from energon_ext.state.consumption import Consumption
from energon_ext.state.schema import digest_of
from energon_ext.state.together import on_all_ranks

logger = log_of(__name__)


class MegatronLMLoader(RerunLoader):
    """The loader of a Megatron-LM run, saved by Megatron-LM and restored from its folders.

    Batches may be of any class. Tokens and documents are counted in a PackedBatch only.

    Attributes:
        drawn: tokens and documents of the batches drawn; after a restore, only the sum over all
            ranks is correct.
        uncounted: number of batches in which they could not be counted.
        counted_for: option of Megatron-LM that needs these counts, if any.
    """

    def __init__(self, dataset: SavableDataset, **loader_options: Any):
        super().__init__(dataset, **loader_options)
        self.drawn = Consumption()
        self.uncounted = 0
        self.counted_for: str | None = None
        self._hash: StepHash | None = None

    def __next__(self) -> Any:
        batch = super().__next__()
        if isinstance(batch, PackedBatch):
            self.drawn.add_batch(batch)
            if self._hash is not None:
                self._hash.add(batch, seq_len=batch.row_tokens or batch.num_tokens)
            return batch
        if self.counted_for is not None:
            raise ConfigError(
                f"{self.counted_for}: it counts the tokens of each source in batches, but the task "
                f"encoder's `batch` returned a {type(batch).__name__}; return a PackedBatch or a "
                f"subclass of it, or leave the option out."
            )
        self.uncounted += 1
        return batch

    def hash_rows(self) -> None:
        """Hash the rows of every batch from here on."""
        self._hash = StepHash()

    def take_hash(self) -> list[int]:
        """Return the parts of the hash of the rows since the last call; zeros without hashes."""
        return [0] * NUM_PARTS if self._hash is None else self._hash.take()

    def save_state(self) -> dict[str, Any]:
        """Return the state for Megatron-LM to save, and create the folder it saves to."""
        # Before megatron-core 0.18, Megatron-LM creates only the folder of data-parallel rank 0,
        # although under expert parallelism each rank writes to its own folder.
        from megatron.training import get_args

        if folder := get_args().dataloader_save:
            # current_iteration counts every step that was begun, including skipped ones.
            iteration = get_rerun_state_machine().current_iteration - is_inside_step()
            path = _path(folder, iteration, self.loader.worker_config.rank)
            os.makedirs(os.path.dirname(path), exist_ok=True)
        return super().save_state()

    def find_state(self, args: argparse.Namespace) -> bool:
        """Read the state that Megatron-LM saved with the loaded model; return True if there is one.

        A planned run can read the file of any rank; a streamed run needs this rank's.
        """
        folder, iteration = args.dataloader_load or args.dataloader_save, args.iteration
        rank, files = self.loader.worker_config.rank, _files(folder, iteration)
        if not files:
            return False
        if rank not in files and not self.blend.is_planned:
            raise StateFormatError(
                f"The data state of data-parallel rank {rank} at iteration {iteration} is missing "
                f"in {_folder(folder, iteration)}. Copy it there from the original checkpoint."
            )
        self._found = read_megatron_lm_state(files.get(rank, files[min(files)]))
        return True

    def restore_found(self) -> tuple[int, str]:
        """Restore the state that was read; return the batches drawn, and a digest if planned."""
        self.restore_state(self._found)
        # In a planned run all ranks restore the same state, so only rank 0 counts it.
        if self.loader.worker_config.rank == 0 or not self.blend.is_planned:
            for change in self.changes:
                self.drawn.add(change.key, rows=change.documents, tokens=change.tokens)
        return self.next_batch_index, digest_of(self._found if self.blend.is_planned else None)


def restore_together(loader: MegatronLMLoader | None, args: argparse.Namespace) -> None:
    """Restore the data of all ranks or none; all ranks call this, and if one fails, all raise."""
    found = on_all_ranks(lambda: None if loader is None else loader.find_state(args))
    has_state = [value for value in found if value is not None]
    folder = args.dataloader_load or args.dataloader_save
    path = _folder(folder, args.iteration) if folder else "a folder of --dataloader-save"
    if all(has_state):
        restored = on_all_ranks(lambda: None if loader is None else loader.restore_found())
        for name, values in zip(("batches drawn", "digest"), zip(*filter(None, restored))):
            if len(set(values)) > 1:
                raise StateMismatchError(
                    {name: (sorted(set(values)), "the same on every rank")},
                    f"{folder} mixes data states from different saves; use those of one save.",
                )
    elif any(has_state):
        raise StateFormatError(
            f"Only {sum(has_state)} of {len(has_state)} ranks that load data found a data state of "
            f"iteration {args.iteration} ({path}). Copy the missing files, or resume from another "
            f"checkpoint."
        )
    elif args.dataloader_load:
        raise StateFormatError(
            f"--dataloader-load {folder} has no data state of iteration {args.iteration} "
            f"(none in {path}). Correct the path, or omit the option to start the data over."
        )
    else:
        # Having no state may be intended (a model from elsewhere); having part of one is damage.
        logger.warning(
            "NO DATA STATE: the model continues from iteration %d, but %s has no data state, so "
            "the data starts over and the model will see earlier data again. To continue the data "
            "as well, set --dataloader-load to the folder it was saved in.",
            args.iteration,
            path,
        )


def _files(folder: str | None, iteration: int) -> dict[int, Path]:
    """Return the data states of an iteration by data-parallel rank."""
    if not folder:
        return {}
    # Before megatron-core 0.18 a rank's folder name also has its expert-parallel rank.
    paths = sorted(_folder(folder, iteration).glob("*/train_dataloader_dprank*.pt"))
    return {int(path.stem.rpartition("dprank")[2]): path for path in reversed(paths)}


def _folder(folder: str, iteration: int) -> Path:
    return Path(_path(folder, iteration, 0)).parent.parent


def _path(folder: str, iteration: int, rank: int) -> str:
    """Return Megatron-LM's path of a rank's data state, written by the first pipeline stage."""
    from megatron.training.checkpointing import get_checkpoint_name

    basename = f"train_dataloader_dprank{rank:03d}.pt"
    return str(get_checkpoint_name(folder, iteration, pipeline_rank=0, basename=basename))
