# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The training script: stopped, resumed, resharded, interrupted, out of data."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.example_checkpoints import Checkpoints
from tests.megatron import processes
from tests.megatron.pretraining import SCRIPT, SMALL, events, run, start, steps_of, write_mixes

TENSORS = ("--tensor-model-parallel-size", "2")
STAGES = ("--pipeline-model-parallel-size", "2")


@pytest.fixture(scope="module")
def mixes(tmp_path_factory):
    return write_mixes(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module", params=["tokens", pytest.param("text", marks=pytest.mark.nightly)])
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def references(mixes, tmp_path_factory):
    """Uninterrupted runs, by kind."""
    folder = tmp_path_factory.mktemp("runs")

    def reference(kind):
        if not (folder / kind).exists():
            run(mixes[kind], folder / kind, "--micro-batch-rows", "2")
        return folder / kind

    return reference


def checkpoints(run_dir):
    return Checkpoints(run_dir / "checkpoints")


def test_a_run_logs_what_it_does(references):
    reference = references("tokens")
    (begin,) = events(reference, "start")
    assert begin["step"] == 0
    assert len(begin["sources"]) == 2
    assert set(begin["documents"].values()) == {40}
    assert (begin["seq_len"], begin["rows_per_step"]) == (64, 4)
    steps = events(reference, "step")
    assert [step["step"] for step in steps] == [1, 2, 3, 4, 5, 6]
    assert steps[-1]["loss"] < steps[0]["loss"]
    code, _ = begin["sources"]
    assert [step["planned_share"][code] > 0 for step in steps] == [False] * 3 + [True] * 3
    for step in steps:
        assert sum(step["planned_share"].values()) == pytest.approx(1)
        assert 0 < sum(step["tokens"].values()) <= 4 * 64
        assert 0 < step["trained_tokens"] <= sum(step["tokens"].values())
        assert set(step["loss_by_source"]) == set(step["tokens"])
    saves = [Path(save["path"]).name for save in events(reference, "save")]
    assert saves == ["iter_0000002", "iter_0000004", "iter_0000006"]
    assert events(reference, "end") == [{"event": "end", "step": 6, "reason": "finished"}]


def recount(steps, field):
    """Sum a field by source over all steps."""
    return sum((Counter(step[field]) for step in steps), Counter())


def offsets(consumed, field):
    return Counter({entry["spec"]: entry[field] for entry in consumed["datasets"] if entry[field]})


def test_consumption_equals_a_recount_of_the_steps(references, kind):
    steps, counts = events(references(kind), "step"), events(references(kind), "consumption")
    assert [event["step"] for event in counts] == [2, 4, 6]
    for event in counts:
        done = steps[: event["step"]]
        tokens = recount(done, "tokens")
        assert offsets(event, "token_offset") == tokens
        assert offsets(event, "row_offset") == recount(done, "documents")
        total = sum(tokens.values())
        assert event["shares"] == pytest.approx({key: n / total for key, n in tokens.items()})
        in_an_epoch = events(references(kind), "start")[0]["epoch_tokens"]
        assert event["epochs"] == {
            entry["spec"]: entry["token_offset"] / in_an_epoch[entry["spec"]]
            for entry in event["datasets"]
        }
    saved = checkpoints(references(kind)).run_of(6)["consumed"]
    assert offsets(saved, "token_offset") == tokens


def test_the_cursor_of_a_planned_run_has_the_same_counts(references):
    for step in (2, 4, 6):
        saved = checkpoints(references("tokens"))
        sources = saved.data_of(step)[None]["plan"]["sources"]
        consumed = saved.run_of(step)["consumed"]
        for field, counted in (("token_offset", "tokens"), ("row_offset", "documents")):
            drawn = {key: source[counted] for key, source in sources.items()}
            assert +Counter(drawn) == offsets(consumed, field)


def test_a_resumed_run_equals_the_uninterrupted_one(mixes, references, kind, tmp_path):
    run_dir, options = tmp_path / "run", ("--micro-batch-rows", "2")
    run(mixes[kind], run_dir, *options, "--stop-after", "3")
    assert events(run_dir, "end") == [{"event": "end", "step": 3, "reason": "stopped"}]
    run(mixes[kind], run_dir, *options, "--resume")
    assert [begin["step"] for begin in events(run_dir, "start")] == [0, 3]
    assert steps_of(run_dir) == steps_of(references(kind))
    # Consumption is counted across the resume.
    assert events(run_dir, "consumption")[-1] == events(references(kind), "consumption")[-1]


def test_a_resume_names_changed_options_and_a_new_run_keeps_old_checkpoints(mixes, tmp_path):
    run_dir = tmp_path / "run"
    run(mixes["tokens"], run_dir, "--stop-after", "2")
    stderr = run(mixes["tokens"], run_dir, "--resume", "--lr", "0.5", succeeds=False)
    assert "StateMismatchError" in stderr
    assert "lr: saved 0.004, now 0.5" in stderr
    cursor = run_dir / "checkpoints" / "iter_0000002" / "data.json"
    cursor.rename(run_dir / "elsewhere")
    line = run(mixes["tokens"], run_dir, "--resume", succeeds=False).splitlines()[-1]
    assert line.startswith(f"StateFormatError: {cursor.parent}: data.json is missing. Copy it")
    stderr = run(mixes["tokens"], run_dir, succeeds=False)
    assert "Traceback" not in stderr
    folder = run_dir / "checkpoints"
    line = f"ConfigError: {folder} has checkpoints; use --resume or another --run-dir."
    assert stderr.splitlines()[-1] == line


def assert_same_rows_and_losses(found, expected):
    assert found.keys() == expected.keys()
    for step, one in found.items():
        for field in ("batch_hash", "tokens", "documents", "planned_share"):
            assert one[field] == expected[step][field], f"{field} of step {step}"
        assert one["loss"] == pytest.approx(expected[step]["loss"], abs=1e-5)


@pytest.mark.parametrize("kind", ["tokens", pytest.param("text", marks=pytest.mark.nightly)])
def test_a_run_continues_under_any_split(kind, mixes, references, tmp_path):
    """Every hop changes ranks, workers, micro-batches and the split of the model."""
    run_dir = tmp_path / "run"
    for last, ranks, options in (
        (1, 1, ("--num-workers", "2")),
        (2, 2, (*STAGES, "--micro-batch-rows", "1")),
        (4, 2, ("--num-workers", "1", "--micro-batch-rows", "2")),
        (5, 4, (*TENSORS, *STAGES, "--num-workers", "1")),
        (6, 1, ()),
    ):
        resume = ("--resume",) if last > 1 else ()
        run(mixes[kind], run_dir, "--stop-after", str(last), *resume, *options, ranks=ranks)
    assert_same_rows_and_losses(steps_of(run_dir), steps_of(references(kind)))
    assert events(run_dir, "consumption")[-1] == events(references(kind), "consumption")[-1]


@pytest.mark.nightly
def test_experts_on_two_ranks_train_and_resume_as_on_one(mixes, tmp_path):
    alone, split = tmp_path / "alone", tmp_path / "split"
    experts = ("--num-experts", "4")
    run(mixes["tokens"], alone, *experts)
    experts += ("--expert-model-parallel-size", "2", "--micro-batch-rows", "2")
    run(mixes["tokens"], split, *experts, "--stop-after", "2", ranks=2)
    run(mixes["tokens"], split, *experts, "--resume", ranks=2)
    for step, expected in steps_of(alone).items():
        found = steps_of(split)[step]
        assert found["batch_hash"] == expected["batch_hash"]
        # The auxiliary loss is computed per micro-batch, and these are smaller.
        assert found["loss"] == pytest.approx(expected["loss"], abs=5e-3)


@pytest.mark.nightly
def test_under_torchrun_data_parallel_ranks_share_the_rows(mixes, references, tmp_path):
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    arguments = (mixes["tokens"], "--run-dir", tmp_path / "run", *SMALL, "--train-iters", "6")
    subprocess.run(
        [sys.executable, *launcher, SCRIPT, *arguments],
        env={**os.environ, "PYTHONPATH": str(SCRIPT.parents[1]), "OMP_NUM_THREADS": "1"},
        check=True,
        timeout=processes.TIMEOUT_SECONDS,
    )
    assert_same_rows_and_losses(steps_of(tmp_path / "run"), steps_of(references("tokens")))


def test_a_run_and_its_resume_end_cleanly_when_all_sources_end(kind, tmp_path):
    mix = write_mixes(tmp_path, texts=8)[kind]
    capped, run_dir = mix.with_name("capped.yaml"), tmp_path / "run"
    content = json.loads(mix.read_text())
    entries = content["splits"]["train"]["blend"]
    content["splits"]["train"]["blend"] = [{"path": e["path"], "max_epochs": 1} for e in entries]
    capped.write_text(json.dumps(content))
    options = ("--train-iters", "1000", "--save-interval", "500", "--micro-batch-rows", "1")
    stderr = run(capped, run_dir, *options, ranks=2)
    assert "Every source has reached its max_epochs (" in stderr
    assert "prose: 1" in stderr or "prose:train: 1" in stderr
    assert "Traceback" not in stderr
    end = events(run_dir, "end")[-1]
    assert end["reason"] == "exhausted"
    assert checkpoints(run_dir).newest() == end["step"]
    documents = recount(events(run_dir, "step"), "documents")
    assert set(documents.values()) == {8}
    run(capped, run_dir, *options, "--resume", ranks=2)
    assert events(run_dir, "end")[-1] == end
    assert len(events(run_dir, "save")) == 1


def test_resuming_without_a_checkpoint_is_a_one_line_error(mixes, tmp_path):
    stderr = run(mixes["tokens"], tmp_path / "run", "--resume", succeeds=False)
    assert "Traceback" not in stderr
    line = stderr.splitlines()[-1]  # after warnings of Megatron-core
    assert line.startswith("ConfigError: ")
    assert "has no checkpoint; start the run without --resume" in line


def test_a_nan_loss_is_a_one_line_error_and_in_no_checkpoint(mixes, tmp_path):
    options = ("--lr", "1e30", "--lr-warmup-iters", "1", "--save-interval", "1")
    stderr = run(mixes["tokens"], tmp_path / "run", *options, succeeds=False)
    line = stderr.splitlines()[-1]
    assert re.match(
        r"SampleError: Step \d: the loss is (nan|inf) \(.*prose (nan|inf).*\). The step was not",
        line,
    )
    failed = int(line.split()[2][:-1])
    assert checkpoints(tmp_path / "run").newest() == failed - 1
    assert [step["step"] for step in events(tmp_path / "run", "step")] == [*range(1, failed)]


@pytest.mark.parametrize(
    ("number", "ranks", "code"), [(signal.SIGINT, 1, 1), (signal.SIGTERM, 2, 0)]
)
def test_a_run_asked_to_stop_saves_its_current_step(mixes, number, ranks, code, tmp_path):
    run_dir = tmp_path / "run"
    stderr = run_dir.with_suffix(".stderr")
    options = ("--train-iters", "1000000", "--save-interval", "500000")
    first, *others = start(mixes["tokens"], run_dir, *options, ranks=ranks)
    while not events(run_dir, "step"):
        assert first.is_alive(), stderr.read_text()
        time.sleep(0.05)
    os.kill(first.pid, number)  # the other rank learns of it from this one
    assert processes.finish([first, *others]) == [code] * ranks
    step = events(run_dir, "step")[-1]["step"]
    assert checkpoints(run_dir).newest() == step
    assert events(run_dir, "end") == [{"event": "end", "step": step, "reason": "stopped"}]
    assert "Traceback" not in stderr.read_text()
    last = stderr.read_text().splitlines()[-1]
    if number == signal.SIGINT:
        assert last == f"Stopped: saved step {step} in {run_dir}; continue with --resume."
    else:
        assert last.startswith(f"stopped at step {step}; ")
        assert last.endswith(f"; saved in {checkpoints(run_dir).folder_of(step)}")


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_under_torchrun_a_signal_to_all_processes_ends_both_ranks_after_one_step(
    mixes, number, tmp_path
):
    """Every process gets the signal twice: from its group, and from torchrun."""
    run_dir, log = tmp_path / "run", tmp_path / "stderr"
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    options = ("--train-iters", "1000000", "--save-interval", "500000")
    with log.open("w") as stderr:
        torchrun = subprocess.Popen(
            [sys.executable, *launcher, SCRIPT, mixes["tokens"], "--run-dir", run_dir]
            + [*SMALL, *options],
            env={**os.environ, "PYTHONPATH": str(SCRIPT.parents[1]), "OMP_NUM_THREADS": "1"},
            stderr=stderr,
            start_new_session=True,
        )
        while not events(run_dir, "step"):
            assert torchrun.poll() is None, log.read_text()
            time.sleep(0.05)
        os.killpg(torchrun.pid, number)
        torchrun.wait(processes.TIMEOUT_SECONDS)
    step = events(run_dir, "step")[-1]["step"]
    assert checkpoints(run_dir).newest() == step
    assert events(run_dir, "end") == [{"event": "end", "step": step, "reason": "stopped"}]
    run(mixes["tokens"], run_dir, "--train-iters", str(step + 1), "--resume")
    assert events(run_dir, "end")[-1]["reason"] == "finished"


def test_a_resume_may_extend_the_run(mixes, tmp_path):
    run_dir = tmp_path / "run"
    run(mixes["tokens"], run_dir, "--train-iters", "2")
    assert events(run_dir, "end")[-1]["reason"] == "finished"
    run(mixes["tokens"], run_dir, "--train-iters", "3", "--resume")
    assert [*steps_of(run_dir)] == [1, 2, 3]


def with_validation(mix, path, times=1):
    """Write a metadataset with the same sources in the splits train and val."""
    content = json.loads(mix.read_text())
    entries = content["splits"]["train"]["blend"]
    for entry in entries:
        entry["path"] = str(mix.parent / entry["path"])
    content["splits"]["val"] = {"blend": [{"path": entry["path"]} for entry in entries] * times}
    path.write_text(json.dumps(content))
    return path


def test_a_split_model_evaluates_like_the_whole_one(mixes, tmp_path):
    mix = with_validation(mixes["tokens"], tmp_path / "mix.yaml", times=3)
    options = ("--train-iters", "1", "--eval-interval", "1")
    evaluations = []
    for name, split in (("whole", ()), ("stages", STAGES), ("tensors", TENSORS)):
        run(mix, tmp_path / name, *options, *split, ranks=2 if split else 1)
        evaluations.append(events(tmp_path / name, "evaluation"))
    whole, *others = evaluations
    assert [event["step"] for event in whole] == [0, 1]
    assert all(len([name for name in event if "loss/" in name]) == 6 for event in whole)
    for other in others:
        for one, two in zip(whole, other, strict=True):
            assert two == pytest.approx(one, abs=1e-5)


def test_an_evaluation_too_short_for_all_sources_is_refused(mixes, tmp_path):
    mix = with_validation(mixes["tokens"], tmp_path / "mix.yaml")
    options = ("--train-iters", "1", "--eval-interval", "1", "--eval-iters", "1")
    stderr = run(mix, tmp_path / "run", *options, succeeds=False)
    assert "--eval-iters 1: too few for 2 validation sources; raise it, or leave it out" in stderr


def test_without_a_terminal_a_run_prints_progress_lines_and_its_result(mixes, tmp_path):
    mix = with_validation(mixes["tokens"], tmp_path / "mix.yaml")
    options = ("--log-interval", "4", "--eval-interval", "3", "--eval-iters", "2")
    lines = run(mix, tmp_path / "run", *options).splitlines()
    lines = [line for line in lines if "deprecated" not in line.lower()]  # of Megatron
    number = r"\d+\.\d+"
    rest = rf", lr \S+, grad norm {number}, [\d,]+ tokens/s, waiting for data \d+%"
    val = rf"val/loss {number}, val/loss/.*code {number}, val/loss/.*prose {number}"
    # Weights at positions 3 and 5: prose 2.25 and 1.75, code 3.
    shares = {4: (57, 43), 6: (63, 37)}
    losses = {
        step: rf"loss {number} \(code {number} at {code}%, prose {number} at {prose}%\)"
        for step, (code, prose) in shares.items()
    }
    expected = [
        "reading the first rows",
        f"step 0: {val}",
        f"step 3: {val}",
        f"step 4 of 6: {losses[4]}{rest}",
        f"step 6 of 6: {losses[6]}{rest}",
        f"step 6: {val}",
        f"finished at step 6; loss at step 1 was {number}; now {losses[6]}{rest}; "
        "saved in .*iter_0000006",
    ]
    assert len(lines) == len(expected), lines
    for line, pattern in zip(lines, expected):
        assert re.fullmatch(pattern, line), line
    evaluations = events(tmp_path / "run", "evaluation")
    assert [event["step"] for event in evaluations] == [0, 3, 6]
    assert evaluations[-1]["val/loss"] < evaluations[0]["val/loss"]
    assert all(step["grad_norm"] > 0 for step in events(tmp_path / "run", "step"))
