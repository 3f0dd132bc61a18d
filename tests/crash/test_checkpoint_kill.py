# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""SIGKILL during a save of the examples leaves the previous or the new checkpoint, whole."""

import os
import random
import signal
import sys
import time

import pytest

from energon_ext.state.schema import seal
from tests.example_checkpoints import Checkpoints

MODEL = ("common.pt", "__0_0.distcp", ".metadata", "metadata.json")  # in the order of Megatron
FILE_OPERATIONS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.scandir"}


def save(checkpoints, step, kind):
    """Save content from which :func:`check` can tell the step."""

    def write_model(folder):
        assert not any(folder.iterdir())
        for name in MODEL:
            (folder / name).write_bytes(f"{step}".encode() * 20_000)

    content = {"step": step, "rows": list(range(200))}
    data = (
        {"cursor": seal(content)}
        if kind == "cursor"
        else {"states": [(rank, lambda folder: content) for rank in (0, 1)]}
    )
    checkpoints.save(step, write_model=write_model, run={"step": step}, **data)


def check(checkpoints, kind):
    """Check that all parts of the newest checkpoint are of one step; return the step."""
    step = checkpoints.newest()
    for name in MODEL:
        content = (checkpoints.folder_of(step) / name).read_bytes()
        assert content == f"{step}".encode() * 20_000
    assert checkpoints.run_of(step)["step"] == step
    states = checkpoints.data_of(step)
    assert list(states) == ([None] if kind == "cursor" else [0, 1])
    assert all(state["step"] == step for state in states.values())
    return step


def save_in_a_loop(root, kind, reports):
    checkpoints = Checkpoints(root, keep=2)
    step = checkpoints.newest() or 0
    while True:
        step += 1
        save(checkpoints, step, kind)
        reports.send(step)


@pytest.mark.parametrize("kills", [25, pytest.param(500, marks=pytest.mark.nightly)])
def test_a_writer_killed_at_random_moments_loses_nothing_it_reported(kills, tmp_path, processes):
    chance, unfinished = random.Random(0), 0
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    for number in range(kills):
        kind = "cursor" if number % 2 else "states"
        here, there = processes.Pipe(duplex=False)
        writer = processes.Process(target=save_in_a_loop, args=(checkpoints.folder, kind, there))
        writer.start()
        there.close()
        reported = here.recv()  # from now on the loop is always inside a save
        time.sleep(chance.uniform(0, 0.03))
        writer.kill()
        writer.join()
        assert writer.exitcode == -signal.SIGKILL
        try:
            while True:
                reported = here.recv()
        except EOFError:
            pass
        # Killed after the tracker and before the report, the writer is one step ahead.
        newest = check(checkpoints, kind)
        assert newest in (reported, reported + 1)
        folders = sorted(checkpoints.folder.glob("iter_*"))
        unfinished += folders[-1] != checkpoints.folder_of(newest)
        assert len(folders) <= 4  # two kept, one not removed yet, one unfinished
    assert unfinished > kills / 10


def kill_at_operation(number):
    """Kill this process before its n-th file operation from now on."""
    left = iter(range(number - 1))

    def hook(event, _):
        if event in FILE_OPERATIONS and next(left, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def kill_at_operations(root, kind, results):
    os.fsync = lambda descriptor: None  # takes most of the time and does not matter here
    checkpoints, outcomes, killed = Checkpoints(root, keep=1), [], True
    while killed:
        step = 2 * len(outcomes) + 1
        save(checkpoints, step, kind)
        child = os.fork()
        if child == 0:
            kill_at_operation(len(outcomes) + 1)
            save(checkpoints, step + 1, kind)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        killed = os.WIFSIGNALED(status)
        outcomes.append(check(checkpoints, kind) - step)
        if outcomes[-1] == 0:  # the same save again, over the remains of the killed one
            save(checkpoints, step + 1, kind)
            assert check(checkpoints, kind) == step + 1
    results.send(outcomes)


@pytest.mark.parametrize("kind", ["cursor", "states"])
def test_a_writer_killed_at_any_file_operation_leaves_the_previous_or_the_new_checkpoint(
    kind, tmp_path, processes
):
    here, there = processes.Pipe(duplex=False)
    writer = processes.Process(target=kill_at_operations, args=(tmp_path / "runs", kind, there))
    writer.start()
    there.close()
    outcomes = here.recv()
    assert outcomes == sorted(
        outcomes
    )  # the previous checkpoint up to some operation, the new one after it
    assert outcomes.count(0) > 15 and outcomes.count(1) > 5
