# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Fine-tuning and reinforcement learning as people run them: stopped, resumed, and learning."""

import json
import runpy
import shutil
import sys
from pathlib import Path

import pytest

from tests.megatron import processes
from tests.rl.prompts import write_prompts

EXAMPLES = Path(__file__).parents[2] / "examples"
FEW_STEPS = [
    *("--num-layers", "1", "--hidden-size", "64"),
    *("--warm-up-iters", "80", "--train-iters", "4", "--lr-warmup-iters", "1"),
    *("--prompts-per-call", "48", "--groups-per-batch", "3", "--save-interval", "2"),
    *("--eval-prompts", "16", "--eval-interval", "2"),
]


def run_example(name, arguments):
    """A script finds its neighbours."""
    sys.path.insert(0, str(EXAMPLES))
    sys.argv = [name, *arguments]
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def run(name, folder, *arguments, succeeds=True):
    """Standard error of a run in a process of its own."""
    stderr = folder.with_suffix(".stderr")
    words = [*map(str, arguments), "--run-dir", str(folder)]
    (code,) = processes.finish([processes.start(run_example, (name, words), stderr)])
    assert (code == 0) is succeeds, stderr.read_text()[-3000:]
    return stderr.read_text()


def steps(folder):
    """Metrics of each step; of a step that was logged twice the later, and without speeds."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {
        line["step"]: {name: value for name, value in line.items() if "perf/" not in name}
        for line in lines
        if "train/loss" in line
    }


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    records = [{"prompt": f"{n} plus 1 is ", "response": f"{n + 1}."} for n in range(40)]
    turns = [{"role": "user", "content": "say a"}, {"role": "assistant", "content": "a"}]
    records += [{"messages": turns * 2}] * 10
    return write_prompts(tmp_path_factory.mktemp("chats") / "chats.jsonl", records)


def test_fine_tuning_learns_answers_and_resumes_exactly(chats, tmp_path):
    options = (chats, "--train-iters", 8, "--seq-length", 64, "--hidden-size", 32, "--lr", 0.01)
    run("02_sft.py", tmp_path / "whole", *options)
    run("02_sft.py", tmp_path / "parts", *options, "--stop-after", 3)
    run("02_sft.py", tmp_path / "parts", *options, "--resume")
    whole = steps(tmp_path / "whole")
    assert steps(tmp_path / "parts") == whole
    assert whole[8]["train/loss"] < whole[1]["train/loss"] - 0.5
    assert 0 < whole[1]["train/tokens"] < 8 * 64 / 2  # answers only
    stderr = run("02_sft.py", tmp_path / "parts", *options, succeeds=False)
    assert "holds checkpoints: --resume, or take another folder" in stderr
    stderr = run("02_sft.py", tmp_path / "new", *options, "--resume", succeeds=False)
    assert "holds no checkpoint to --resume; begin without it" in stderr


@pytest.fixture(scope="module")
def grpo_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "reference"
    run("03_grpo.py", folder, *FEW_STEPS)
    return folder


def test_grpo_says_what_was_sampled(grpo_run):
    found = steps(grpo_run / "grpo")
    assert list(found) == [1, 2, 3, 4]
    for step in found.values():
        assert step["rollout/valid_groups"] == 3
        assert step["rollout/zero_var_groups"] <= step["rollout/attempts_per_batch"]
        assert step["rollout/attempts_per_batch"] % 48 == 0
        assert 0 <= step["rollout/reward/mean"] < 0.5
    assert {"eval/sampled", "eval/greedy"} <= set(found[4])


def test_grpo_stopped_and_resumed_is_the_run_that_was_not(grpo_run, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(grpo_run / "warm_up", folder / "warm_up")
    run("03_grpo.py", folder, *FEW_STEPS, "--resume", "--stop-after", 3)
    run("03_grpo.py", folder, *FEW_STEPS, "--resume")
    assert steps(folder / "grpo") == steps(grpo_run / "grpo")


def last_accuracy(folder, *options):
    run("03_grpo.py", folder, *options)
    lines = [json.loads(line) for line in (folder / "grpo" / "metrics.jsonl").open()]
    evaluations = [line for line in lines if "eval/sampled" in line]
    assert evaluations[0]["step"] == 0
    assert evaluations[0]["eval/sampled"] <= 0.1
    assert evaluations[0]["eval/greedy"] <= 0.2
    return evaluations[-1]["eval/sampled"]


@pytest.mark.nightly
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_grpo_learns_to_sort(seed, tmp_path):
    assert last_accuracy(tmp_path / "run", "--seed", seed) >= 0.85


@pytest.mark.nightly
def test_shuffled_rewards_teach_nothing(tmp_path):
    assert last_accuracy(tmp_path / "run", "--shuffle-rewards") <= 0.1
