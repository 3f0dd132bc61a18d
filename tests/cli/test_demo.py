# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause

from types import SimpleNamespace

import pytest

from energon_ext.cli import demo as demo_module
from energon_ext.cli.corpora import CORPORA
from tests.cli.command import energon_ext, error_line
from tests.cli.runs import write_run


@pytest.fixture
def training(monkeypatch):
    """Made-up runs in place of training.

    ``stages`` lists what was called; ``damage`` is a batch hash that the resumed process writes.
    """
    fake = SimpleNamespace(stages=[], damage=None)

    def train(stage, blend, run_dir, steps, *options):
        fake.stages.append((blend, run_dir.name, *options))
        resumed_after = [steps // 2] if "--resume" in options else []
        if "--stop-after" not in options:
            write_run(run_dir, steps=steps, resumed_after=resumed_after, damage=fake.damage)

    monkeypatch.setattr(demo_module, "_train", train)
    monkeypatch.setattr(demo_module, "_prepare", lambda data: data.mkdir(parents=True))
    return fake


def test_the_demo_stops_resumes_and_finds_both_runs_equal(tmp_path):
    """The real thing, short: three processes of the training script on real text."""
    result = energon_ext("demo", "--dir", tmp_path / "demo", "--steps", 6)
    assert result.exit_code == 0, result.output
    assert "6 of 6  batches equal to the uninterrupted run's, largest difference of the loss 0" in (
        result.stdout
    )
    assert f"{tmp_path / 'demo' / 'report.html'}" in result.stdout
    assert (tmp_path / "demo" / "report.html").is_file()
    for name in ("mix", "loss", "consumption", "resume"):
        assert (tmp_path / "demo" / f"{name}.png").is_file()


def test_the_demo_trains_half_resumes_and_trains_without_a_stop(tmp_path, training):
    result = energon_ext("demo", "--dir", tmp_path / "demo", "--steps", 20)
    assert result.exit_code == 0, result.output
    blend = tmp_path / "demo" / "curriculum.yaml"
    assert training.stages == [
        (blend, "resumed", "--stop-after", 10),
        (blend, "resumed", "--resume"),
        (blend, "uninterrupted"),
    ]
    assert "path: data/prose" in blend.read_text()


def test_a_resume_that_differs_fails_with_the_first_step(tmp_path, training):
    training.damage = "another hash"
    result = energon_ext("demo", "--dir", tmp_path / "demo", "--steps", 20)
    assert result.exit_code == 1
    assert result.stderr.splitlines() == [
        "Error: The resumed run differs from the uninterrupted one, first at step 11: "
        "10 of 20 batches identical, largest difference of the loss 0.001."
    ]


def test_a_training_script_that_fails_ends_the_demo(tmp_path, monkeypatch):
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit(3)")
    monkeypatch.setattr(demo_module, "TRAINING_SCRIPT", script)
    monkeypatch.setattr(demo_module, "_prepare", lambda data: data.mkdir(parents=True))
    result = energon_ext("demo", "--dir", tmp_path / "demo")
    assert result.exit_code == 1
    assert "ended with exit code 3" in result.stderr


def test_an_installed_package_without_the_examples_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(demo_module, "TRAINING_SCRIPT", tmp_path / "examples" / "01.py")
    line = error_line(energon_ext("demo", "--dir", tmp_path / "demo"))
    assert "01.py: not there" in line and "make demo" in line
    assert not (tmp_path / "demo").exists()


def test_the_curriculum_itself_is_used_where_its_data_is(monkeypatch):
    monkeypatch.chdir(demo_module.CHECKOUT)
    assert demo_module._curriculum(demo_module.Path("demo")) == demo_module.CURRICULUM


@pytest.mark.parametrize(
    ("corpus", "expected"),
    [("prose", "assert"), ("code", "import"), ("docs", "Energon")],
)
def test_the_corpora_are_real_text_in_a_fixed_order(corpus, expected):
    documents = [document.text for document in CORPORA[corpus]().documents]
    assert documents == [document.text for document in CORPORA[corpus]().documents]
    assert sum(map(len, documents)) > 200_000
    assert any(expected in text for text in documents)
