# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""examples/demo.py with made-up runs, and once for real."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.runs import write_run

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))
import demo  # noqa: E402
from demo_corpora import CORPORA  # noqa: E402

STEPS = 24


@pytest.fixture
def stages_started(monkeypatch):
    """The stages the demo started; each writes a made-up run instead of training."""
    stages = []

    def train(mix, run_dir, steps, stage, resumes=False):
        stages.append((run_dir.name, stage.processes, stage.last, stage.killed, resumes))
        write_run(
            run_dir, steps=stage.last, resumed_after=[4, 8][: len(stages) - 1 if resumes else 0]
        )

    monkeypatch.setattr(demo, "train", train)
    monkeypatch.setattr(demo, "prepare", lambda folder, steps: folder / "curriculum.yaml")
    return stages


def run_demo(folder, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["demo.py", "--dir", str(folder), "--steps", str(STEPS)])
    with pytest.raises(SystemExit) as ended:
        demo.main()
    return ended.value.code


def test_the_run_is_killed_resharded_twice_and_compared_with_an_undisturbed_one(
    stages_started, tmp_path, monkeypatch, capsys
):
    assert run_demo(tmp_path, monkeypatch) is None
    assert stages_started == [
        ("changing", 1, 10, True, False),  # killed between the checkpoints of steps 8 and 12
        ("changing", 2, 16, False, True),
        ("changing", 2, 24, False, True),
        ("left_alone", 1, 24, False, False),
    ]
    assert "24 of 24  steps that read the same rows" in capsys.readouterr().out
    for name in ("demo.png", "mix.png", "loss.png", "report.html"):
        assert (tmp_path / name).stat().st_size > 10_000


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"batch_hash": "another"}, "The rows differ, first in step 9."),
        ({"loss": 1.0}, "Losses differ by more than 0.0001."),
    ],
)
def test_a_run_that_differs_fails_the_demo(damage, message, stages_started, tmp_path, monkeypatch):
    compare = demo.compare

    def compare_damaged(folder, run, alone, stages):
        return compare(folder, change_ninth_step(run, damage), alone, stages)

    monkeypatch.setattr(demo, "compare", compare_damaged)
    monkeypatch.setattr(demo, "write_report", lambda run, folder: ["report.html"])
    assert run_demo(tmp_path, monkeypatch) == message


def change_ninth_step(run, damage):
    """Change the ninth step of a run."""
    if "loss" in damage:
        run.loss[8] = damage["loss"]
    hashes = list(run.batch_hash)
    hashes[8] = damage.get("batch_hash", hashes[8])
    object.__setattr__(run, "batch_hash", tuple(hashes))
    return run


@pytest.mark.parametrize("killed", [True, False])
def test_a_training_script_that_fails_ends_the_demo(killed, tmp_path, monkeypatch):
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit(3)")
    monkeypatch.setattr(demo, "TRAINING_SCRIPT", script)
    stage = demo.Stage("one", 1, (), 8, killed=killed)
    with pytest.raises(SystemExit, match="(exited with status 3|ended before step 8), see above"):
        demo.train(tmp_path / "mix.yaml", tmp_path / "run", STEPS, stage)


def test_the_demo_runs_on_cpus_also_where_there_is_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    script = tmp_path / "train.py"
    script.write_text("import os; assert os.environ['CUDA_VISIBLE_DEVICES'] == ''")
    monkeypatch.setattr(demo, "TRAINING_SCRIPT", script)
    demo.train(tmp_path / "mix.yaml", tmp_path / "run", STEPS, demo.Stage("one", 1, (), 8))


@pytest.mark.parametrize(
    ("corpus", "expected"), [("prose", "assert"), ("code", "import"), ("docs", "Energon")]
)
def test_the_corpora_are_real_text_in_a_fixed_order(corpus, expected):
    texts = CORPORA[corpus]()
    assert texts == CORPORA[corpus]()
    assert sum(map(len, texts)) > 200_000
    assert any(expected in text for text in texts)


@pytest.mark.nightly
def test_the_demo_trains_on_real_text_and_finds_both_runs_equal(tmp_path):
    arguments = ["--dir", str(tmp_path), "--steps", str(STEPS)]
    found = subprocess.run(
        [sys.executable, EXAMPLES / "demo.py", *arguments],
        env={**os.environ, "PYTHONPATH": str(EXAMPLES.parent)},
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stderr[-3000:]
    assert "24 of 24  steps that read the same rows" in found.stdout
