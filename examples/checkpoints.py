# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The checkpoints of a run in Megatron-LM's layout: one folder per save, and a tracker.

    checkpoints/
      iter_0000030/                        the model, by megatron.core.dist_checkpointing, and
        data.json                          the cursor of a planned run
        data_rank00003.json                or the state of each data-parallel rank, for answers
        answers_rank00003_DIGEST.npz       with their tensors
        run.json                           other state of the run; written last
      latest_checkpointed_iteration.txt    30

The tracker is replaced after everything else is on disk, so a process killed at any time leaves
either the previous checkpoint or the new one.
"""

import contextlib
import json
import shutil

import torch.distributed as dist

from energon_ext import ConfigError, EnergonExtError
from energon_ext.errors import StateFormatError, first_line
from energon_ext.state.checkpoint_folder import (
    CURSOR,
    TRACKER,
    cursors_in,
    read_sealed,
    tracked_iteration,
    write_sealed,
    write_state,
)
from energon_ext.state.files import write_file
from energon_ext.state.together import on_all_ranks
from energon_ext.storage.whole_file import fsync

RUN = "run.json"


class Checkpoints:
    """The checkpoints of one run.

    Args:
        folder: folder of all checkpoints; the first save creates it.
        keep: number of newest complete checkpoints to keep.
    """

    def __init__(self, folder, keep=3):
        self.folder, self.keep = folder, keep

    def folder_of(self, step):
        return self.folder / f"iter_{step:07d}"

    def newest(self):
        """Return the step of the newest complete checkpoint, or None if there is none."""
        return tracked_iteration(self.folder)

    def save(self, step, *, write_model, run, cursor=None, states=()):
        """Save one step; all ranks call this together, and if one fails, all raise.

        Args:
            write_model: function that writes the model into an empty folder, on all ranks together.
            run: JSON object for run.json, on rank 0.
            cursor: cursor of a planned run, on rank 0.
            states: for a streamed run or answers, (data-parallel rank, folder -> state) pairs of
                this process.
        """
        folder = self.folder_of(step)

        def write_states():
            for rank, save in states:
                write_state(folder / f"data_rank{rank:05d}.json", save(folder))

        def publish():
            if cursor is not None:
                write_file(folder / CURSOR, json.dumps(cursor).encode())
            written = sorted(path.name for path in folder.glob("data*.json"))
            write_sealed(folder / RUN, {**run, "data": written})
            write_file(self.folder / TRACKER, str(step).encode())
            self._remove_old(step)

        try:
            _on_rank_zero(lambda: self._begin(step))
            on_all_ranks(lambda: write_model(folder))
            on_all_ranks(write_states)
            _on_rank_zero(publish)
        except (OSError, RuntimeError) as error:
            raise EnergonExtError(
                f"{folder}: the save failed ({first_line(error)}); earlier checkpoints are intact. "
                f"Free disk space or fix the folder, then --resume."
            ) from error
        return folder

    def run_of(self, step):
        """Return the content of run.json."""
        return read_sealed(self.folder_of(step) / RUN)

    def data_of(self, step):
        """Return the data states by data-parallel rank; the cursor of a planned run under None."""
        folder = self.folder_of(step)
        for name in self.run_of(step)["data"]:
            if not (folder / name).exists():
                raise StateFormatError(
                    f"{folder}: {name} is missing. Copy it again from its original, or write the "
                    f"step of another checkpoint into {self.folder / TRACKER}."
                )
        return dict(cursors_in(folder))

    def _begin(self, step):
        folder = self.folder_of(step)
        if tracked_iteration(self.folder) == step:
            raise ConfigError(f"{folder} is the newest checkpoint and is not overwritten.")
        if folder.exists():
            shutil.rmtree(folder)  # left by a killed save, or by a run that went back
        folder.mkdir(parents=True)
        fsync(self.folder)

    def _remove_old(self, step):
        """Remove older checkpoints, except the newest complete ones, which have a run.json."""
        numbers = [path.name[5:] for path in self.folder.glob("iter_*")]
        saved = sorted((int(number) for number in numbers if number.isdecimal()), reverse=True)
        older = [self.folder_of(number) for number in saved if number < step]
        complete = [path for path in older if (path / RUN).exists()]
        for path in older:
            if path not in complete[: self.keep - 1]:
                with contextlib.suppress(OSError):  # files in use are removed by a later save
                    (path / RUN).unlink(missing_ok=True)
                    shutil.rmtree(path)


def _on_rank_zero(work):
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    on_all_ranks(work if is_first else lambda: None)
