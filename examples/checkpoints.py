# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The checkpoints of a run, laid out as those of Megatron-LM: a folder per save, and a tracker.

    checkpoints/
      iter_0000030/                        the model, by megatron.core.dist_checkpointing, and
        data.json                          the cursor of a planned run
        data_rank00003.json                or the state of each data-parallel rank
        run.json                           what else the run needs; written last
      latest_checkpointed_iteration.txt    30

The tracker is replaced when everything else is on disk, so a process that is killed at any moment
leaves the previous checkpoint or the new one.
"""

import contextlib
import json
import shutil

import torch.distributed as dist

from energon_ext import ConfigError, EnergonExtError
from energon_ext.errors import StateFormatError
from energon_ext.state.checkpoint_folder import (
    CURSOR,
    TRACKER,
    cursors_in,
    read_sealed,
    tracked_iteration,
    write_sealed,
    write_state,
)
from energon_ext.state.files import first_line, fsync, write_file
from energon_ext.state.together import on_all_ranks

RUN = "run.json"


class Checkpoints:
    """The checkpoints of one run.

    Args:
        folder: of all; the first save makes it.
        keep: the newest complete checkpoints that stay.
    """

    def __init__(self, folder, keep=3):
        self.folder, self.keep = folder, keep

    def folder_of(self, step):
        return self.folder / f"iter_{step:07d}"

    def newest(self):
        """The step of the newest complete checkpoint; None where there is none."""
        return tracked_iteration(self.folder)

    def save(self, step, *, write_model, run, cursor=None, states=()):
        """Save one step; all ranks call this together, and if one fails, all raise.

        Args:
            write_model: writes the model into an empty folder, on all ranks together.
            run: JSON object for run.json, of rank 0.
            cursor: of a planned run, of rank 0.
            states: of another run, pairs of a data-parallel rank and its state, of this process.
        """
        folder = self.folder_of(step)

        def write_states():
            for rank, state in states:
                write_state(folder / f"data_rank{rank:05d}.json", state)

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
                f"{folder}: the save failed ({first_line(error)}); earlier checkpoints are whole. "
                f"Make room or mend the folder, then --resume."
            ) from error
        return folder

    def run_of(self, step):
        """The content of run.json."""
        return read_sealed(self.folder_of(step) / RUN)

    def data_of(self, step):
        """The data states by data-parallel rank; the cursor of a planned run under None."""
        folder = self.folder_of(step)
        for name in self.run_of(step)["data"]:
            if not (folder / name).exists():
                raise StateFormatError(
                    f"{folder} has lost its {name}. Copy it again from where it came, or write "
                    f"the step of another checkpoint into {self.folder / TRACKER}."
                )
        return dict(cursors_in(folder))

    def _begin(self, step):
        folder = self.folder_of(step)
        if tracked_iteration(self.folder) == step:
            raise ConfigError(f"{folder} is the newest checkpoint; it is not written again.")
        if folder.exists():
            shutil.rmtree(folder)  # a save that was killed, or of a run that went back
        folder.mkdir(parents=True)
        fsync(self.folder)

    def _remove_old(self, step):
        """Remove all older ones but the newest that are complete, which have a run.json."""
        numbers = [path.name[5:] for path in self.folder.glob("iter_*")]
        saved = sorted((int(each) for each in numbers if each.isdecimal()), reverse=True)
        older = [self.folder_of(each) for each in saved if each < step]
        complete = [path for path in older if (path / RUN).exists()]
        for path in older:
            if path not in complete[: self.keep - 1]:
                with contextlib.suppress(OSError):  # what is in use goes with a later save
                    (path / RUN).unlink(missing_ok=True)
                    shutil.rmtree(path)


def _on_rank_zero(work):
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    on_all_ranks(work if is_first else lambda: None)
