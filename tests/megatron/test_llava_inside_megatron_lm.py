# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The launch script for images inside the real Megatron-LM: LLaVA, saved and resumed elsewhere."""

import shutil

import pytest

from energon_ext.metrics.file import Run
from tests.megatron.test_inside_megatron_lm import RUNNER, launcher, pytestmark, run
from tests.megatron.test_vision_example import mix

__all__ = ["launcher", "mix", "pytestmark"]  # fixtures, and the marks of this module

LAUNCH = RUNNER.parents[2] / "examples" / "launch"


def options_of(name):
    lines = (LAUNCH / f"{name}.args").read_text().splitlines()
    return " ".join(line for line in lines if not line.startswith("#"))


def run_llava(mix, folder, *options, ranks=1, **more):
    """Train six steps of four rows, with the options of the launch scripts."""
    length = "--global-batch-size 4 --train-iters 6 --lr-warmup-iters 1"
    small = "--hidden-size 32 --num-attention-heads 4 --eval-iters 1 --eval-interval 3"
    given = (options_of("llava_small"), options_of("energon"), small, "--num-workers 0", length)
    log = f"--save-interval 3 --energon-run-dir {folder}/run"
    script = "pretrain_vlm.py"
    return run(mix, folder, *given, log, *options, ranks=ranks, script=script, length="", **more)


@pytest.fixture(scope="module")
def whole(mix, tmp_path_factory):
    """The losses and evaluations of an uninterrupted run on one rank, and its folder."""
    folder = tmp_path_factory.mktemp("whole")
    return *run_llava(mix, folder), folder


@pytest.fixture(scope="module")
def saved(mix, tmp_path_factory):
    """Three steps of two data-parallel ranks with a worker each, with rows assigned by cost."""
    folder = tmp_path_factory.mktemp("saved")
    states = f"--save {folder}/model --dataloader-save {folder}/data --exit-interval 3"
    losses, _ = run_llava(
        mix, folder, states, "--energon-balance attention --num-workers 1", ranks=2
    )
    return losses, folder


def test_images_and_text_train_and_evaluate(whole):
    losses, evaluations, folder = whole
    assert list(losses) == ["1", "2", "3", "4", "5", "6"] and list(evaluations) == ["3", "6"]
    assert float(losses["6"]) < float(losses["1"]) - 0.5
    assert float(evaluations["6"]) < float(evaluations["3"])
    assert len(Run.load(folder / "run").sources) == 3  # the pictures, the pairs and the prose


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (1, ""),
        (2, "--overlap-grad-reduce"),
        (2, "--tensor-model-parallel-size 2"),
        (2, "--pipeline-model-parallel-size 2"),
        (4, "--tensor-model-parallel-size 2"),
    ],
    ids=[
        "one rank",
        "data parallel",
        "tensor parallel",
        "pipeline parallel",
        "tensor and data parallel",
    ],
)
def test_a_balanced_run_continues_on_other_ranks(ranks, layout, mix, whole, saved, tmp_path):
    losses, evaluations, folder = whole
    before, states = saved
    shutil.copytree(states / "run", tmp_path / "run")
    loaded = f"--load {states}/model --dataloader-load {states}/data"
    after, evaluated = run_llava(mix, tmp_path, loaded, layout, ranks=ranks)
    assert list(after) == ["4", "5", "6"] and list(evaluated) == ["6"]
    # Megatron-LM logs the mean of the first two iterations of a process as the second.
    for found, iterations in ((before, "13"), (after, "46")):
        for iteration in iterations:
            assert float(found[iteration]) == pytest.approx(float(losses[iteration]), abs=1e-5)
    assert float(evaluated["6"]) == pytest.approx(float(evaluations["6"]), abs=1e-5)
    hashes = Run.load(folder / "run").batch_hash
    assert Run.load(tmp_path / "run").batch_hash == hashes and len(set(hashes)) == 6
