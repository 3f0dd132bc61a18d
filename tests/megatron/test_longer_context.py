# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The example that continues a run with longer rows."""

import os
import re
import subprocess
import sys

import pytest

from tests.megatron.pretraining import SCRIPT, steps_of

pytestmark = pytest.mark.nightly


def test_a_run_continues_with_longer_rows_and_as_many_tokens_per_step(tmp_path):
    command = [sys.executable, SCRIPT.with_name("08_longer_context.py"), tmp_path]
    options = ["--train-iters", "6", "--eval-rows", "1"]
    result = subprocess.run(
        [*command, *options],
        env={**os.environ, "PYTHONPATH": str(SCRIPT.parents[1])},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    runs = {name: steps_of(tmp_path / "runs" / name) for name in ("same", "longer")}
    tokens = {name: [sum(s["tokens"].values()) for s in run.values()] for name, run in runs.items()}
    assert tokens["same"] == pytest.approx([4096] * 6, rel=0.05)
    assert tokens["longer"] == pytest.approx([4096] * 6, rel=0.05)
    hashes = [[step["batch_hash"] for step in run.values()] for run in runs.values()]
    assert hashes[0][:4] == hashes[1][:4] and hashes[0][4:] != hashes[1][4:]
    losses = re.findall(r"256.*: (.*)", result.stdout)
    assert len(losses) == 3 and all(len(line.split(", ")) == 16 for line in losses)
    assert (tmp_path / "longer_context.png").stat().st_size > 10_000
