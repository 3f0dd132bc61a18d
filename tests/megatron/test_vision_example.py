# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""A vision-language model of megatron-core on images and text: stopped, split and resumed."""

import importlib
import sys

import pytest

from tests.megatron import processes
from tests.megatron.pretraining import PROSE, SCRIPT, events, steps_of, write_token_file
from tests.megatron.test_example import assert_same_rows_and_losses

EXAMPLES = SCRIPT.parent
SMALL = [
    *("--train-iters", "4", "--save-interval", "10", "--lr-warmup-iters", "1"),
    *("--num-layers", "2", "--hidden-size", "32", "--global-batch-rows", "4"),
    *("--eval-interval", "2", "--eval-iters", "1"),
]


def run(mix, run_dir, *options, ranks=1):
    arguments = [mix, "--run-dir", run_dir, *SMALL, *options]
    stderr = run_dir.with_suffix(".stderr")
    script = EXAMPLES / "06_vision_language.py"
    codes = processes.finish(processes.start_script(script, arguments, stderr, ranks))
    assert not any(codes), stderr.read_text()[-3000:]


@pytest.fixture(scope="module")
def mix(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vision")
    sys.path.insert(0, str(EXAMPLES))
    try:
        drawn = importlib.import_module("drawn_images")
    finally:
        sys.path.remove(str(EXAMPLES))
    drawn.write_webdataset(folder / "shapes", 60, lambda number: number % 10 != 9, 20)
    drawn.write_webdataset(folder / "pairs", 20, lambda number: 2, 10)
    write_token_file(folder / "prose" / "train", PROSE)
    path = folder / "mix.yaml"
    path.write_text(drawn.MIX.replace("60:", "4:"))
    return path


@pytest.fixture(scope="module")
def whole_run(mix, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "whole"
    run(mix, folder)
    return folder


def test_a_run_continues_on_other_ranks_and_workers_with_equal_losses(mix, whole_run, tmp_path):
    whole = steps_of(whole_run)
    sources = {source for step in whole.values() for source in step["loss_by_source"]}
    assert len(sources) == 3  # the pictures, the pairs and the prose
    parts = tmp_path / "parts"
    run(mix, parts, "--stop-after", "2", "--num-workers", "2")
    options = ("--resume", "--num-workers", "1", "--micro-batch-rows", "1", "--balance")
    run(mix, parts, *options, ranks=2)
    assert_same_rows_and_losses(steps_of(parts), whole)
    assert whole[4]["loss"] < whole[1]["loss"] - 0.5
    losses = [event["val/loss"] for event in events(whole_run, "evaluation")]
    assert len(losses) == 3 and losses[-1] < losses[0]


TENSORS = ("--tensor-model-parallel-size", "2")
STAGES = ("--pipeline-model-parallel-size", "2")


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("ranks", "options"),
    [(2, TENSORS), (2, STAGES), (2, ()), (4, (*TENSORS, *STAGES))],
    ids=["tensor parallel", "pipeline parallel", "data parallel", "tensor and pipeline"],
)
def test_every_split_of_the_model_has_the_losses_of_one_rank(
    ranks, options, mix, whole_run, tmp_path
):
    """Images reach every tensor-parallel rank; the vision encoder is on the first stage."""
    parts = tmp_path / "parts"
    run(mix, parts, "--stop-after", "3", "--micro-batch-rows", "2", *options, ranks=ranks)
    run(mix, parts, "--resume")
    assert_same_rows_and_losses(steps_of(parts), steps_of(whole_run))
