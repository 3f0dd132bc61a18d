# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The examples of fine-tuning, preferences and answers: stopped, resumed, and learning."""

import json
import math
import os
import runpy
import shutil
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.megatron import processes
from tests.megatron.pretraining import CODE, PROSE, events, steps_of
from tests.rl.prompts import write_prompts
from tests.support import write_texts

EXAMPLES = Path(__file__).parents[2] / "examples"
STAGES = "--pipeline-model-parallel-size"
FEW_STEPS = [
    *("--num-layers", "1", "--hidden-size", "64"),
    *("--warm-up-iters", "80", "--train-iters", "4", "--lr-warmup-iters", "1"),
    *("--prompts-per-call", "32", "--groups-per-batch", "2", "--save-interval", "99"),
    *("--eval-prompts", "8", "--eval-interval", "2"),
]


#: Of a whole experiment, which takes minutes, on a busy machine.
LEARNING_SECONDS = 1800


def run_example(name, arguments):
    sys.path.insert(0, str(EXAMPLES))
    sys.argv = [name, *arguments]
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def run(name, folder, *arguments, succeeds=True, seconds=processes.TIMEOUT_SECONDS):
    """Run an example in its own process and return its standard error."""
    stderr = folder.with_suffix(".stderr")
    words = [*map(str, arguments), "--run-dir", str(folder)]
    started = processes.start(run_example, (name, words), stderr)
    (code,) = processes.finish([started], seconds)
    assert (code == 0) is succeeds, stderr.read_text()[-3000:]
    return stderr.read_text()


def evaluations(folder):
    """Return the evaluations by step; the later one if a step was logged twice."""
    return {event["step"]: event for event in events(folder, "evaluation")}


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
    whole = steps_of(tmp_path / "whole")
    assert steps_of(tmp_path / "parts") == whole
    assert whole[8]["loss"] < whole[1]["loss"] - 0.5
    assert 0 < whole[1]["trained_tokens"] < 8 * 64 / 2  # answers only
    stderr = run("02_sft.py", tmp_path / "parts", *options, succeeds=False)
    assert "has checkpoints; use --resume or another --run-dir" in stderr
    stderr = run("02_sft.py", tmp_path / "new", *options, "--resume", succeeds=False)
    assert "has no checkpoint; start the run without --resume" in stderr


FEW_PAIRS = [
    *("--num-layers", "1", "--hidden-size", "32", "--warm-up-iters", "2", "--orders", "60"),
    *("--train-iters", "4", "--lr-warmup-iters", "1", "--global-batch-rows", "4"),
    *("--eval-prompts", "8", "--eval-interval", "2"),
]


def test_preferences_begin_at_the_reference_and_resume_exactly(tmp_path):
    run("10_dpo.py", tmp_path / "whole", *FEW_PAIRS)
    run("10_dpo.py", tmp_path / "parts", *FEW_PAIRS, "--stop-after", 3)
    run("10_dpo.py", tmp_path / "parts", *FEW_PAIRS, "--resume")
    whole = steps_of(tmp_path / "whole" / "dpo")
    assert steps_of(tmp_path / "parts" / "dpo") == whole and list(whole) == [1, 2, 3, 4]
    assert whole[1]["loss"] == pytest.approx(math.log(2), abs=1e-4)
    assert whole[4]["loss"] < whole[1]["loss"]
    for folder in ("whole", "parts"):
        assert evaluations(tmp_path / folder / "dpo").keys() == {0, 2, 4}
    assert len(list((tmp_path / "parts" / "data").glob(".energon_ext_cache/pairs.jsonl-*"))) == 2


@pytest.mark.nightly
@pytest.mark.parametrize("split", ["--tensor-model-parallel-size", STAGES, None])
def test_preferences_of_a_split_model_have_the_same_losses(split, tmp_path):
    options = [*FEW_PAIRS, "--num-layers", "2", "--num-workers", "1"]
    run("10_dpo.py", tmp_path / "one", *options)
    words = [*options, "--run-dir", str(tmp_path / "two"), *([split, "2"] if split else [])]
    started = processes.start_script(EXAMPLES / "10_dpo.py", words, tmp_path / "stderr", ranks=2)
    assert processes.finish(started) == [0, 0], (tmp_path / "stderr").read_text()[-3000:]
    found, expected = (steps_of(tmp_path / name / "dpo") for name in ("two", "one"))
    assert list(found) == [1, 2, 3, 4]
    for step, values in expected.items():
        assert found[step]["loss"] == pytest.approx(values["loss"], abs=1e-3)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_preferences_teach_to_sort(seed, tmp_path):
    run("10_dpo.py", tmp_path / "run", "--seed", seed, seconds=LEARNING_SECONDS)
    found = evaluations(tmp_path / "run" / "dpo")
    assert found[0]["eval/greedy"] <= 0.2
    assert found[max(found)]["eval/greedy"] >= 0.7


@pytest.mark.nightly
def test_shuffled_preferences_teach_nothing(tmp_path):
    run("10_dpo.py", tmp_path / "run", "--shuffle-preferences", seconds=LEARNING_SECONDS)
    found = evaluations(tmp_path / "run" / "dpo")
    assert found[max(found)]["eval/greedy"] <= 0.2


@pytest.fixture(scope="module")
def grpo_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "reference"
    run("03_grpo.py", folder, *FEW_STEPS)
    return folder


def test_grpo_logs_what_was_sampled(grpo_run):
    found = steps_of(grpo_run / "grpo")
    assert list(found) == [1, 2, 3, 4]
    for step in found.values():
        assert step["rollout/valid_groups"] == 2
        assert step["rollout/zero_var_groups"] <= step["rollout/attempts_per_batch"]
        assert step["rollout/attempts_per_batch"] % 32 == 0
        assert 0 <= step["rollout/reward/mean"] < 0.5
        assert step["batch_hash"] and 0 < step["trained_tokens"] < sum(step["tokens"].values())
    found = evaluations(grpo_run / "grpo")
    assert list(found) == [0, 2, 4]
    assert {"eval/sampled", "eval/greedy"} <= set(found[4])


@pytest.mark.nightly
def test_a_resumed_grpo_run_equals_the_uninterrupted_one(grpo_run, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(grpo_run / "warm_up", folder / "warm_up")
    options = (*FEW_STEPS, "--save-interval", 2, "--resume")
    run("03_grpo.py", folder, *options, "--stop-after", 3)
    run("03_grpo.py", folder, *options)
    saves = [Path(event["path"]).name for event in events(folder / "grpo", "save")]
    assert saves == ["iter_0000002", "iter_0000003", "iter_0000004"]
    for found in (steps_of, evaluations):
        assert found(folder / "grpo") == found(grpo_run / "grpo")


@pytest.mark.nightly
@pytest.mark.parametrize(
    "split", ["--tensor-model-parallel-size", "--pipeline-model-parallel-size"]
)
def test_grpo_of_a_split_model_trains_on_the_same_batches(grpo_run, split, tmp_path):
    words = [*FEW_STEPS, "--run-dir", str(tmp_path / "run"), split, "2"]
    words[words.index("--num-layers") + 1] = "2" if split == STAGES else "1"
    started = processes.start_script(EXAMPLES / "03_grpo.py", words, tmp_path / "stderr", ranks=2)
    assert processes.finish(started) == [0, 0], (tmp_path / "stderr").read_text()[-3000:]
    found, reference = steps_of(tmp_path / "run" / "grpo"), steps_of(grpo_run / "grpo")
    assert list(found) == list(reference)
    if split != STAGES:  # the stages have a layer each, the reference one in all
        for step, values in reference.items():
            assert found[step]["batch_hash"] == values["batch_hash"]
            assert found[step]["loss"] == pytest.approx(values["loss"], abs=1e-4)


def test_a_run_that_samples_refuses_states_that_are_not_of_one_save(grpo_run, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(grpo_run, folder)
    (state,) = folder.glob("grpo/checkpoints/iter_0000004/data_rank00000.json")
    shutil.copy(state, state.with_name("data_rank00001.json"))
    stderr = run("03_grpo.py", folder, *FEW_STEPS, "--resume", succeeds=False)
    assert "StateFormatError: The data states of ranks [0, 0] were given" in stderr


@pytest.mark.nightly
def test_a_run_that_samples_resumes_on_other_ranks(grpo_run, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(grpo_run, folder)
    words = [*FEW_STEPS, "--train-iters", "6", "--resume", "--run-dir", str(folder)]
    started = processes.start_script(EXAMPLES / "03_grpo.py", words, tmp_path / "stderr", ranks=2)
    assert processes.finish(started) == [0, 0], (tmp_path / "stderr").read_text()[-3000:]
    found = steps_of(folder / "grpo")
    assert list(found) == [1, 2, 3, 4, 5, 6]
    assert found[6]["rollout/valid_groups"] == 2 * found[4]["rollout/valid_groups"]


def last_accuracy(folder, *options, example="03_grpo.py"):
    run(example, folder, *options, seconds=LEARNING_SECONDS)
    found = evaluations(folder / "grpo")
    assert found[0]["eval/sampled"] <= 0.3
    return found[max(found)]["eval/sampled"]


@pytest.mark.nightly
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_grpo_learns_to_sort(seed, tmp_path):
    assert last_accuracy(tmp_path / "run", "--seed", seed) >= 0.85


@pytest.mark.nightly
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_policy_learns_to_use_a_calculator(seed, tmp_path):
    assert last_accuracy(tmp_path / "run", "--seed", seed, example="09_tool_use.py") >= 0.85


@pytest.mark.nightly
@pytest.mark.parametrize("example", ["03_grpo.py", "09_tool_use.py"])
def test_shuffled_rewards_teach_nothing(example, tmp_path):
    assert last_accuracy(tmp_path / "run", "--shuffle-rewards", example=example) <= 0.3


@pytest.mark.nightly
def test_a_warm_up_that_is_asked_to_stop_ends_the_run(tmp_path):
    run_dir, stderr = tmp_path / "run", tmp_path / "stderr"
    words = [*FEW_STEPS, "--run-dir", str(run_dir), "--warm-up-iters", "100000"]
    process = processes.start(run_example, ("03_grpo.py", words), stderr)
    while not events(run_dir / "warm_up", "step"):
        assert process.is_alive(), stderr.read_text()
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGTERM)
    assert processes.finish([process]) == [0]
    assert not (run_dir / "grpo").exists()


FEW_WORDS = [
    *("--hidden-size", "32", "--teacher-iters", "6", "--train-iters", "4", "--documents", "2"),
    *("--lr-warmup-iters", "1", "--eval-interval", "2", "--words", "4"),
]


@pytest.mark.nightly
def test_a_swarm_is_trained_fitted_and_continued(tmp_path):
    for name, own in {"prose": PROSE, "code": CODE, "docs": PROSE[::-1]}.items():
        write_texts(tmp_path / "data" / name, own)
    small = ["--mixes", 5, "--train-iters", 3, "--hidden-size", 32, "--lr-warmup-iters", 1]
    small += ["--target-tokens", 6000]  # a run here has 3072, so half of the documents are read
    run("13_mix_swarm.py", tmp_path / "runs", tmp_path, *small)
    table = (tmp_path / "runs" / "losses.csv").read_text()
    rows = [line.split(",") for line in table.splitlines()]
    assert len(rows) == 1 + 5 + 2 and (tmp_path / "runs" / "mix_swarm.png").stat().st_size > 5000
    for name, *values in rows[1:]:
        shares, losses = np.array(values, float).reshape(2, 3)
        assert shares.sum() == pytest.approx(1) and (losses > 1).all() and (losses < 7).all(), name
    mix = json.loads((tmp_path / "runs" / "swarm.mix03.yaml").read_text())
    weights = [entry["weight"] for entry in mix["splits"]["train"]["interleave"]]
    assert weights == pytest.approx([float(share) for share in rows[4][1:4]], abs=1e-4)
    run("13_mix_swarm.py", tmp_path / "runs", tmp_path, *small, "--resume")
    assert (tmp_path / "runs" / "losses.csv").read_text() == table


@pytest.mark.nightly
def test_a_student_is_stopped_and_resumed_exactly(tmp_path):
    run("12_distillation.py", tmp_path / "whole", *FEW_WORDS)
    run("12_distillation.py", tmp_path / "parts", *FEW_WORDS, "--stop-after", 3)
    run("12_distillation.py", tmp_path / "parts", *FEW_WORDS, "--resume")
    whole = steps_of(tmp_path / "whole" / "student")
    assert steps_of(tmp_path / "parts" / "student") == whole and list(whole) == [1, 2, 3, 4]
    assert whole[4]["teacher_kl"] < whole[1]["teacher_kl"]
    assert evaluations(tmp_path / "whole" / "student").keys() == {0, 2, 4}


@pytest.mark.nightly
def test_a_student_nears_its_teacher_and_loses_less_than_on_labels_alone(tmp_path):
    found = {}
    for alpha in ("0.9", "0"):
        run("12_distillation.py", tmp_path / alpha, "--alpha", alpha, seconds=LEARNING_SECONDS)
        by_step = evaluations(tmp_path / alpha / "student")
        found[alpha] = by_step[max(by_step)]
        assert found[alpha]["val/teacher_kl"] < by_step[0]["val/teacher_kl"] - 1
    assert found["0.9"]["val/loss"] < found["0"]["val/loss"] - 0.03
    assert found["0.9"]["val/teacher_kl"] < found["0"]["val/teacher_kl"] - 0.08
