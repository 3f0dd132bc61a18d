# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""torch.cuda stands for the CPU where there is no GPU, and only there."""

from pathlib import Path

import pytest
import torch
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.transformer.moe import moe_utils

from energon_ext import ConfigError
from energon_ext.megatron import enable_cpu, select_gpu

CHECKOUT = Path(__file__).parents[2]


def test_cuda_means_cpu():
    assert enable_cpu() is True
    assert torch.zeros(2, device="cuda").device.type == "cpu"
    assert torch.ones(2, device=torch.device("cuda", 0)).device.type == "cpu"
    assert torch.empty(2, device=torch.cuda.current_device()).device.type == "cpu"
    tensor = torch.zeros(2)
    assert tensor.cuda() is tensor
    assert tensor.to("cuda", torch.int64).dtype == torch.int64
    assert tensor.to(device="cuda").device.type == "cpu"
    with torch.cuda.stream(torch.cuda.Stream(device=torch.cuda.current_device())):
        torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
    torch.cuda.synchronize()


def test_other_devices_stay_as_they_are():
    enable_cpu()
    assert torch.zeros(2, device="meta").device.type == "meta"
    assert torch.zeros(2).to(torch.float64).dtype == torch.float64
    assert torch.zeros(2).type(torch.int64).dtype == torch.int64


def test_enabling_twice_changes_nothing():
    enable_cpu()
    before = torch.cuda.current_device, torch.cuda.Stream, len(_active_modes())
    enable_cpu()
    assert (torch.cuda.current_device, torch.cuda.Stream, len(_active_modes())) == before


def test_with_a_gpu_nothing_is_changed(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    original = torch.cuda.current_device
    assert enable_cpu() is False
    assert torch.cuda.current_device is original


def test_megatron_clips_gradients():
    enable_cpu()
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, 4.0])
    clip_grad_by_total_norm_fp32([parameter], max_norm=1.0, total_norm=5.0)
    torch.testing.assert_close(parameter.grad, torch.tensor([0.6, 0.8]))


def test_the_global_that_megatron_forgets_exists():
    enable_cpu()
    assert moe_utils.te_general_gemm is None


@pytest.mark.parametrize(("rank", "gpus"), [(0, 1), (3, 4)])
def test_every_process_of_a_node_has_its_own_gpu(rank, gpus, monkeypatch):
    selected = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setenv("LOCAL_RANK", str(rank))
    monkeypatch.setattr(torch.cuda, "set_device", selected.append)
    select_gpu()
    assert selected == [rank]


def test_more_processes_than_gpus_are_an_error_with_two_ways_out(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(ConfigError) as error:
        select_gpu()
    assert str(error.value) == (
        "2 processes found on a node with 1 GPU(s); start at most 1 (--nproc-per-node 1), or set "
        "CUDA_VISIBLE_DEVICES= to run on CPUs."
    )


@pytest.mark.parametrize("folder", ["docs", "examples"])
def test_no_script_takes_a_gpu_unchecked(folder):
    files = [*(CHECKOUT / folder).rglob("*.md"), *(CHECKOUT / folder).rglob("*.py")]
    texts = {path: path.read_text() for path in files}
    assert any("select_gpu()" in text for text in texts.values())
    assert not [path for path, text in texts.items() if "cuda.set_device(" in text]


def _active_modes():
    return torch.overrides._get_current_function_mode_stack()
