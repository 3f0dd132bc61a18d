# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""SIGKILL during a save: the previous checkpoint or the new one, and whole."""

import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

from energon_ext.state.checkpoint import CheckpointStore

PACKAGE = str(Path(sys.modules[CheckpointStore.__module__].__file__).parent)


def save(store, step):
    """A model, a cursor, a file and metadata, from which :func:`check` can tell the step."""
    store.save(
        step,
        {"data_rank00000.pt": {"step": step, "state": list(range(200))}},
        write_model=lambda folder: torch.save(torch.full((20_000,), step), folder / "part.pt"),
        data={"step": step},
        metadata={"step": step},
    )


def check(checkpoint):
    model = torch.load(checkpoint.model() / "part.pt")
    assert torch.equal(model, torch.full((20_000,), checkpoint.step))
    assert checkpoint.load("data_rank00000.pt")["step"] == checkpoint.step
    assert checkpoint.data() == checkpoint.metadata == {"step": checkpoint.step}
    return checkpoint.step


def save_in_a_loop(root, reports):
    with CheckpointStore(root, keep=2) as store:
        newest = store.latest()
        step = newest.step if newest else 0
        while True:
            step += 1
            save(store, step)
            reports.send(step)


@pytest.mark.parametrize("kills", [30, pytest.param(500, marks=pytest.mark.nightly)])
def test_a_writer_killed_at_random_instants_loses_nothing_that_it_reported(
    kills, tmp_path, processes
):
    rng = random.Random(0)
    store = CheckpointStore(tmp_path / "root")
    reported = unfinished = 0
    for _ in range(kills):
        here, there = processes.Pipe(duplex=False)
        writer = processes.Process(target=save_in_a_loop, args=(store.root, there))
        writer.start()
        there.close()
        reported = here.recv()  # the loop has begun: anything from now on is inside a save
        time.sleep(rng.uniform(0, 0.05))
        writer.kill()
        writer.join()
        assert writer.exitcode == -signal.SIGKILL
        try:
            while True:
                reported = here.recv()
        except EOFError:
            pass
        # Killed after the manifest and before the report, the writer is one step ahead.
        assert check(store.latest()) in (reported, reported + 1)
        directories = [path for path in store.root.iterdir() if path.is_dir()]
        unfinished += any(not (path / "manifest.json").exists() for path in directories)
        assert len(directories) <= 4  # two kept, one not pruned yet, one unfinished
    assert unfinished > kills / 10


class KillAtLine:
    """SIGKILL at the n-th line that the package runs."""

    def __init__(self, line):
        self.left = line

    def __call__(self, frame, event, argument):
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return self


def kill_at_lines(root, stride, results):
    os.fsync = lambda descriptor: None  # half of the time, and of no consequence here
    outcomes = []
    killed = True
    while killed:
        line = len(outcomes) * stride + 1
        with CheckpointStore(root, keep=1) as store:
            save(store, 2 * line)
        child = os.fork()
        if child == 0:
            with CheckpointStore(root, keep=1) as store:
                sys.settrace(KillAtLine(line))
                save(store, 2 * line + 1)
                sys.settrace(None)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        killed = os.WIFSIGNALED(status)
        outcomes.append(check(CheckpointStore(root).latest()) - 2 * line)
    results.send(outcomes)


@pytest.mark.parametrize("stride", [5, pytest.param(1, marks=pytest.mark.nightly)])
def test_a_writer_killed_at_any_line_of_a_save_leaves_the_previous_or_the_new_checkpoint(
    stride, tmp_path, processes
):
    here, there = processes.Pipe(duplex=False)
    writer = processes.Process(target=kill_at_lines, args=(tmp_path, stride, there))
    writer.start()
    there.close()
    outcomes = here.recv()
    assert outcomes == sorted(outcomes)  # the previous up to one line, from then on the new
    assert outcomes.count(0) > 100 / stride and outcomes.count(1) > 10 / stride
