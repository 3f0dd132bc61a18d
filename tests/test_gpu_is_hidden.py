# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Only the tests marked ``gpu`` see a GPU: others compare CPU tensors, or fork."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.conftest import hide_gpu_or_select_its_tests

ROOT = Path(__file__).parents[1]
SUITE = "not nightly and not gpu"


def test_no_gpu_is_visible_here():
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    assert not torch.cuda.is_available()


@pytest.mark.parametrize(
    ("marks", "arguments", "expected"),
    [
        (SUITE, ["tests"], None),
        (SUITE, ["tests/gpu", "tests/loader"], None),
        ("not gpu", ["tests/megatron"], None),
        ("nightly", ["tests"], None),
        (SUITE, ["tests/gpu"], "gpu"),
        (SUITE, ["tests/gpu/test_packed_training.py::test_loader_to_gpu"], "gpu"),
        ("gpu", ["tests"], "gpu"),
    ],
)
def test_a_run_sees_the_gpu_if_it_asks_for_its_tests(marks, arguments, expected, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    config = SimpleNamespace(
        option=SimpleNamespace(markexpr=marks),
        invocation_params=SimpleNamespace(dir=ROOT),
        args=arguments,
    )
    hide_gpu_or_select_its_tests(config)
    assert config.option.markexpr == (expected or marks)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ("0" if expected else "")
