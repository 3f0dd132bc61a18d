# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The training script as people run it: stopped, resumed, split over processes, interrupted."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from energon_ext.state.checkpoint import CheckpointStore
from tests import support
from tests.megatron import processes

SCRIPT = Path(__file__).parents[2] / "examples" / "01_pretrain_gpt.py"
SMALL = [
    *("--train-iters", "6", "--save-interval", "2", "--lr-warmup-iters", "2"),
    *("--num-layers", "2", "--hidden-size", "32"),
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


@pytest.fixture(scope="module")
def reference(mix, tmp_path_factory):
    """A run that was never stopped."""
    run_dir = tmp_path_factory.mktemp("runs") / "reference"
    run(mix, run_dir)
    return run_dir


def run(mix, run_dir, *options, ranks=1, succeeds=True):
    """Run the script in processes of its own; what rank 0 wrote to standard error."""
    stderr = run_dir.with_suffix(".stderr")
    arguments = [mix, "--run-dir", run_dir, *SMALL, *options]
    codes = processes.finish(processes.start_script(SCRIPT, arguments, stderr, ranks))
    assert all((code == 0) is succeeds for code in codes), stderr.read_text()[-3000:]
    return stderr.read_text()


def events(run_dir, kind):
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def comparable(step):
    """All of a step but its speed."""
    return {name: value for name, value in step.items() if name != "tokens_per_second"}


def test_a_run_says_what_it_does(reference):
    (start,) = events(reference, "start")
    assert start["step"] == 0
    assert len(start["sources"]) == 2
    assert set(start["documents"].values()) == {40}
    assert (start["row_length"], start["rows_per_step"]) == (64, 4)
    steps = events(reference, "step")
    assert [step["step"] for step in steps] == [1, 2, 3, 4, 5, 6]
    # Two micro-batches a step, and the schedule counts batches.
    assert [step["batch_index"] for step in steps] == [0, 2, 4, 6, 8, 10]
    assert steps[-1]["loss"] < steps[0]["loss"]
    for step in steps:
        assert sum(step["planned_share"].values()) == pytest.approx(1)
        assert 0 < sum(step["tokens"].values()) <= 4 * 64
        assert set(step["loss_by_source"]) == set(step["tokens"])
    assert [Path(save["path"]).name for save in events(reference, "save")] == [
        "step_00000002",
        "step_00000004",
        "step_00000006",
    ]
    assert events(reference, "end")[0]["reason"] == "finished"


def recount(steps):
    """Tokens and documents of all steps, by source."""
    return [sum((Counter(step[field]) for step in steps), Counter()) for field in COUNTED]


COUNTED = ("tokens", "documents")


def offsets(event, field):
    return Counter({entry["spec"]: entry[field] for entry in event["datasets"] if entry[field]})


def assert_counts(event, steps):
    tokens, documents = recount(steps[: event["step"]])
    assert offsets(event, "token_offset") == tokens
    assert offsets(event, "row_offset") == documents
    total = sum(tokens.values())
    assert event["shares"] == pytest.approx({key: n / total for key, n in tokens.items()})
    # 40 documents in each of both sources.
    assert event["epochs"] == {
        entry["spec"]: entry["row_offset"] / 40 for entry in event["datasets"]
    }


def test_what_was_trained_on_is_an_independent_recount_of_the_steps(reference):
    counts = events(reference, "consumption")
    assert [event["step"] for event in counts] == [2, 4, 6]
    for event in counts:
        assert_counts(event, events(reference, "step"))


def test_a_resumed_run_is_the_run_that_was_never_stopped(mix, reference, tmp_path):
    run_dir = tmp_path / "run"
    run(mix, run_dir, "--stop-after", "3")
    assert events(run_dir, "end")[0] == {"event": "end", "step": 3, "reason": "stopped"}
    stderr = run(mix, run_dir, "--resume", "--lr", "0.5", succeeds=False)
    assert "StateMismatchError" in stderr
    assert "lr: saved 0.004, now 0.5" in stderr
    stderr = run(mix, run_dir, succeeds=False)
    assert "Traceback" not in stderr
    assert stderr.splitlines()[-1] == (
        f"ConfigError: {run_dir} holds a run: --resume it, or take another folder."
    )
    run(mix, run_dir, "--resume")
    assert [start["step"] for start in events(run_dir, "start")] == [0, 3]
    found, expected = events(run_dir, "step"), events(reference, "step")
    assert [comparable(step) for step in found] == [comparable(step) for step in expected]
    # The count goes on over the resume.
    assert events(run_dir, "consumption")[-1] == events(reference, "consumption")[-1]


@pytest.mark.parametrize("split", ["tensor", "pipeline"])
def test_split_over_two_processes_it_trains_the_same(mix, reference, tmp_path, split):
    run_dir = tmp_path / "run"
    options = (f"--{split}-model-parallel-size", "2")
    run(mix, run_dir, *options, "--stop-after", "2", ranks=2)
    run(mix, run_dir, *options, "--stop-after", "4", "--resume", ranks=2)
    found, expected = events(run_dir, "step"), events(reference, "step")[:4]
    assert [step["batch_hash"] for step in found] == [step["batch_hash"] for step in expected]
    for one, other in zip(found, expected):
        assert one["loss"] == pytest.approx(other["loss"], abs=1e-5)


def test_under_torchrun_data_parallel_ranks_share_the_rows(mix, tmp_path):
    run_dir = tmp_path / "run"
    torchrun(mix, run_dir, "--stop-after", "2")
    torchrun(mix, run_dir, "--stop-after", "3", "--resume")
    steps = events(run_dir, "step")
    assert [step["batch_index"] for step in steps] == [0, 1, 2]
    assert steps[1]["loss"] < steps[0]["loss"]
    files = {path.name for path in (run_dir / "checkpoints" / "step_00000002").iterdir()}
    assert {"data_rank00000.pt", "data_rank00001.pt", "model_rank00001.pt"} <= files
    counts = events(run_dir, "consumption")
    assert [event["step"] for event in counts] == [2, 3]
    for event in counts:
        assert_counts(event, steps)
    saved = CheckpointStore(run_dir / "checkpoints").latest()
    ranks = [saved.load(f"consumption_rank{rank:05d}.pt") for rank in range(2)]
    of_ranks = [offsets(json.loads(json.dumps(rank)), "token_offset") for rank in ranks]
    assert of_ranks[0] + of_ranks[1] == offsets(counts[-1], "token_offset")
    assert all(of_ranks)


def torchrun(mix, run_dir, *options):
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    subprocess.run(
        [sys.executable, *launcher, SCRIPT, mix, "--run-dir", run_dir, *SMALL, *options],
        env={**os.environ, "PYTHONPATH": str(SCRIPT.parents[1]), "OMP_NUM_THREADS": "1"},
        check=True,
        timeout=processes.TIMEOUT_SECONDS,
    )


def test_a_run_whose_sources_all_end_says_which_caps_ended_it(mix, tmp_path):
    capped = tmp_path / "capped.yaml"
    entries = [{"path": str(mix.parent / name), "max_epochs": 1} for name in ("prose", "code")]
    head = {"__module__": "energon_ext", "__class__": "ScheduledMetadataset"}
    capped.write_text(json.dumps({**head, "splits": {"train": {"blend": entries}}}))
    stderr = run(capped, tmp_path / "run", "--train-iters", "1000", succeeds=False)
    assert "Traceback" not in stderr
    line = stderr.splitlines()[-1]
    assert line.startswith("DataExhaustedError: Every source has reached its max_epochs (")
    assert "prose:train: 1" in line
    for source in ("prose", "code"):
        assert stderr.count(f"{source}:train: 1 of 1 epochs read; leaves the blend") == 1


def test_resuming_what_does_not_exist_is_one_line(mix, tmp_path):
    stderr = run(mix, tmp_path / "run", "--resume", succeeds=False)
    assert "Traceback" not in stderr
    line = stderr.splitlines()[-1]  # Megatron-core warns of what it misses before it
    assert line.startswith("ConfigError: ")
    assert "holds no checkpoint to --resume" in line


def test_ctrl_c_is_one_line_and_the_last_checkpoint_stays(mix, tmp_path):
    run_dir, stderr = tmp_path / "run", tmp_path / "stderr"
    arguments = [mix, "--run-dir", run_dir, *SMALL, "--train-iters", "1000000"]
    (process,) = processes.start_script(SCRIPT, arguments, stderr)
    while not (run_dir / "metrics.jsonl").exists() or not events(run_dir, "save"):
        assert process.is_alive(), stderr.read_text()
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGINT)
    assert processes.finish([process]) == [1]
    assert stderr.read_text().splitlines()[-1] == (
        f"Stopped by Ctrl-C; the last checkpoint stays in {run_dir / 'checkpoints'}."
    )
    assert "Traceback" not in stderr.read_text()
    assert list((run_dir / "checkpoints").glob("step_*/manifest.json"))
