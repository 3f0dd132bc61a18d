# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""SIGKILL of one of two training processes: after a restart the run equals an uninterrupted one."""

import random
import shutil
import time

import pytest

from energon_ext.state.checkpoint_folder import tracked_iteration
from tests.megatron import processes
from tests.megatron.pretraining import run, start, steps_of, write_mixes

STEPS = 6
LENGTH = ("--train-iters", str(STEPS), "--micro-batch-rows", "2")
SPLITS = {
    "data": (),
    "tensor": ("--tensor-model-parallel-size", "2"),
    "pipeline": ("--pipeline-model-parallel-size", "2"),
}


@pytest.fixture(scope="module")
def mixes(tmp_path_factory):
    return write_mixes(tmp_path_factory.mktemp("data"))


def start_or_resume(mix, run_dir, options):
    begun = tracked_iteration(run_dir / "checkpoints") is not None
    resume = ("--resume",) if begun else ()
    return start(mix, run_dir, *LENGTH, *options, *resume, ranks=2)


def kill_one(mix, run_dir, options, rng):
    """Start two ranks and kill one of them somewhere in a step or a save."""
    ranks = start_or_resume(mix, run_dir, options)
    until = len(steps_of(run_dir)) + rng.randint(1, 2)
    deadline = time.monotonic() + processes.TIMEOUT_SECONDS
    while len(steps_of(run_dir)) < until and all(rank.is_alive() for rank in ranks):
        if time.monotonic() > deadline:
            processes.finish(ranks, seconds=0)  # fails with the number of ranks that hung
        time.sleep(0.005)
    time.sleep(rng.random() * 0.05)
    victim, survivor = rng.sample(ranks, 2)
    victim.kill()
    victim.join()
    survivor.kill()  # as launchers do
    survivor.join()


def check(mix, folder, kills, seed):
    """Compare a run that is killed under each of ``kills``, options of ranks, with a whole run.

    The final resume uses the last options.
    """
    run_dir, reference = folder / "run", folder / "reference"
    run(mix, reference, *LENGTH, *kills[-1], "--save-interval", "99", ranks=2)
    rng = random.Random(seed)
    for options in kills:
        kill_one(mix, run_dir, options, rng)
    codes = processes.finish(start_or_resume(mix, run_dir, kills[-1]))
    assert codes == [0, 0], run_dir.with_suffix(".stderr").read_text()[-3000:]
    found, expected = steps_of(run_dir), steps_of(reference)
    assert sorted(found) == sorted(expected) == list(range(1, STEPS + 1))
    same_split = len(set(kills)) == 1
    for step, one in found.items():
        assert one["batch_hash"] == expected[step]["batch_hash"]
        tolerance = 0 if same_split else 1e-5
        assert one["loss"] == pytest.approx(expected[step]["loss"], abs=tolerance)


@pytest.mark.parametrize("kind", ["tokens", pytest.param("text", marks=pytest.mark.nightly)])
def test_a_killed_data_parallel_rank_costs_no_batch_and_changes_no_loss(mixes, kind, tmp_path):
    check(mixes[kind], tmp_path, [SPLITS["data"]], seed=0)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("kind", ["tokens", "text"])
def test_ranks_killed_again_and_again_change_no_loss(mixes, kind, tmp_path, split, seed):
    check(mixes[kind], tmp_path, 3 * [SPLITS[split]], seed)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(3))
def test_killed_ranks_restarted_under_other_splits_read_the_same_rows(mixes, tmp_path, seed):
    kills = random.Random(f"splits/{seed}").sample(list(SPLITS.values()), 3)
    check(mixes["tokens"], tmp_path, kills, seed)


@pytest.fixture(scope="module")
def stopped(mixes, tmp_path_factory):
    """A run of two ranks stopped after two steps."""
    run_dir = tmp_path_factory.mktemp("stopped") / "run"
    run(mixes["tokens"], run_dir, *LENGTH, "--stop-after", "2", ranks=2)
    return run_dir


@pytest.mark.parametrize("name", ["data.json", ".metadata"])
@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_a_damaged_checkpoint_is_refused_by_all_ranks_and_nothing_is_skipped(
    mixes, stopped, name, tmp_path, damage
):
    run_dir = shutil.copytree(stopped, tmp_path / "run")
    (file,) = (run_dir / "checkpoints").glob(f"iter_*/{name}")
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-100])
    stderr = run(mixes["tokens"], run_dir, *LENGTH, "--resume", ranks=2, succeeds=False)
    assert name in stderr.splitlines()[-1]
    assert "Traceback" not in stderr or name == ".metadata"  # torch logs it
    assert sorted(steps_of(run_dir)) == [1, 2]
