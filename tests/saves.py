# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Checkpoints like those of the examples, but without a model."""

import json

from energon_ext.state.checkpoint_folder import (
    CURSOR,
    TRACKER,
    cursors_in,
    newest_checkpoint,
    write_state,
)
from energon_ext.state.files import write_file


def save_cursor(folder, step, cursor):
    """Save the cursor of a planned run; return the folder of the save."""
    return _save(folder, step, lambda save: write_file(save / CURSOR, json.dumps(cursor).encode()))


def newest_cursor(folder):
    """Read the cursor of the newest save."""
    return dict(cursors_in(newest_checkpoint(folder)))[None]


def save_states(folder, step, *states):
    """Save the state of each rank; return the folder of the save."""

    def write(save):
        for rank, state in enumerate(states):
            write_state(save / f"data_rank{rank:05d}.json", state)

    return _save(folder, step, write)


def _save(folder, step, write):
    save = folder / f"iter_{step:07d}"
    save.mkdir(parents=True)
    write(save)
    write_file(folder / TRACKER, str(step).encode())
    return save
