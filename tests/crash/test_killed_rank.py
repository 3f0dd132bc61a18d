# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""SIGKILL of one of two training processes: all start again, and the run is as if nothing was."""

import json
import random
import time
from pathlib import Path

import pytest

from tests import support
from tests.megatron import processes

SCRIPT = Path(__file__).parents[2] / "examples" / "01_pretrain_gpt.py"
STEPS = 8
SMALL = [
    *("--train-iters", str(STEPS), "--save-interval", "2", "--lr-warmup-iters", "2"),
    *("--num-layers", "2", "--hidden-size", "32", "--num-workers", "0"),
    *("--seq-length", "64", "--global-batch-rows", "4", "--micro-batch-rows", "2"),
]
TEXTS = [f"The {animal} sat on the mat. " * 5 for animal in ("cat", "dog", "cow", "hen")] * 10


@pytest.fixture(scope="module")
def mix(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    support.write_dataset(folder / "prose", TEXTS)
    support.write_dataset(folder / "code", [text.replace(" ", "_") for text in TEXTS])
    weights = [("./prose", {"linear": {0: 3, 8: 1}}), ("./code", {"step": {0: 0, 5: 3}})]
    return support.write_mix(folder / "mix.yaml", weights)


def start(mix, run_dir, options):
    arguments = [mix, "--run-dir", run_dir, *SMALL, *options]
    if list((run_dir / "checkpoints").glob("step_*/manifest.json")):
        arguments.append("--resume")
    return processes.start_script(SCRIPT, arguments, run_dir.with_suffix(".stderr"), ranks=2)


def steps_of(run_dir):
    """Every step as it was last trained, without its speed."""
    metrics = run_dir / "metrics.jsonl"
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    steps = [event for event in map(json.loads, lines) if event["event"] == "step"]
    return {
        event["step"]: {name: value for name, value in event.items() if name != "tokens_per_second"}
        for event in steps
    }


def train_through_kills(mix, run_dir, options, rng, kills):
    for _ in range(kills):
        ranks = start(mix, run_dir, options)
        until = len(steps_of(run_dir)) + rng.randint(1, 2)
        while len(steps_of(run_dir)) < until and all(rank.is_alive() for rank in ranks):
            time.sleep(0.005)
        time.sleep(rng.random() * 0.05)  # anywhere in a step or a save
        victim, survivor = rng.sample(ranks, 2)
        victim.kill()
        victim.join()
        survivor.kill()  # as launchers do
        survivor.join()
    assert processes.finish(start(mix, run_dir, options)) == [0, 0], run_dir.with_suffix(
        ".stderr"
    ).read_text()[-3000:]


def check(mix, folder, options, kills, seed):
    run_dir, reference = folder / "run", folder / "reference"
    assert processes.finish(start(mix, reference, options)) == [0, 0]
    train_through_kills(mix, run_dir, options, random.Random(seed), kills)
    expected = steps_of(reference)
    assert sorted(expected) == list(range(1, STEPS + 1))
    assert steps_of(run_dir) == expected


def test_a_killed_data_parallel_rank_costs_no_batch_and_changes_no_loss(mix, tmp_path):
    check(mix, tmp_path, (), kills=1, seed=0)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("split", ["data", "tensor", "pipeline"])
def test_ranks_killed_again_and_again_change_no_loss(mix, tmp_path, split, seed):
    options = () if split == "data" else (f"--{split}-model-parallel-size", "2")
    check(mix, tmp_path, options, kills=3, seed=seed)


@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_a_checkpoint_without_its_data_is_refused_and_nothing_is_skipped(mix, tmp_path, damage):
    run_dir = tmp_path / "run"
    options = ("--stop-after", "2")
    assert processes.finish(start(mix, run_dir, options)) == [0, 0]
    (data,) = (run_dir / "checkpoints").glob("step_*/data_rank00001.pt")
    if damage == "missing":
        data.unlink()
    else:
        data.write_bytes(data.read_bytes()[:-100])
    assert 0 not in processes.finish(start(mix, run_dir, ()))
    errors = [run_dir.with_suffix(".stderr").read_text()]
    errors.append(Path(f"{run_dir.with_suffix('.stderr')}.1").read_text())
    assert any("data_rank00001.pt" in error for error in errors)
    assert sorted(steps_of(run_dir)) == [1, 2]
