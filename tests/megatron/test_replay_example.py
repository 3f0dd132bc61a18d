# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The example of given experts: with them the model is nearer to its sampler."""

import contextlib

import pytest

from tests.megatron import processes
from tests.megatron.forced_routing import NEEDS_REPLAY
from tests.megatron.test_task_examples import run_example


def run_printing(name, arguments, stdout):
    with open(stdout, "w") as file, contextlib.redirect_stdout(file):
        run_example(name, arguments)


@NEEDS_REPLAY
@pytest.mark.nightly
def test_the_first_answers_are_nearer_with_the_experts_of_the_sampler(tmp_path):
    arguments = ["--run-dir", str(tmp_path / "run"), "--train-iters", "2"]
    stdout, stderr = tmp_path / "stdout", tmp_path / "stderr"
    target = ("11_replay_experts.py", arguments, str(stdout))
    assert processes.finish([processes.start(run_printing, target, stderr)]) == [0], (
        stderr.read_text()[-3000:]
    )
    header, *steps = stdout.read_text().splitlines()
    assert header.startswith("step") and len(steps) == 2
    _, _, own, replayed = map(float, steps[0].split())
    assert 0 < replayed < own / 3
