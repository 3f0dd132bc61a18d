# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Layers of state spaces in a packed batch: Megatron's own mixer, its kernel in plain torch."""

import importlib
import sys
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.process_groups_config import ProcessGroupCollection

from energon_ext import ConfigError
from energon_ext.megatron import (
    build_packed_seq_params,
    forward_step,
    slice_for_context_parallel,
    step,
)
from tests.megatron.small_gpt import documents_of, small_config, synthetic_batch
from tests.megatron.test_context_parallel import LENGTHS, aligned_batch

pytestmark = pytest.mark.usefixtures("one_rank")

HEADS, CHANNELS, STATE = 8, 8, 4


@pytest.fixture(scope="module")
def mamba_mixer():
    """Megatron's module, which wants triton for kernels that training does not call."""
    absent = {} if importlib.util.find_spec("triton") else {"triton": mock.MagicMock()}
    absent |= {f"{name}.language": mock.MagicMock() for name in absent}
    sys.modules.update(absent)
    try:
        return importlib.import_module("megatron.core.ssm.mamba_mixer")
    finally:
        for name in absent:
            del sys.modules[name]


def scan(zxbcdt, conv_weight, conv_bias, dt_bias, a, *, seq_idx, **_):
    """The recurrence of Mamba 2, one position at a time; a change of ``seq_idx`` empties it.

    As the kernel that it stands for (https://arxiv.org/abs/2405.21060): a causal convolution over
    four positions, then per head ``state = exp(dt * a) * state + dt * x * b`` and ``y = state c``.
    """
    width = HEADS * CHANNELS
    z, xbc, dt = zxbcdt[0].split([width, width + 2 * STATE, HEADS], dim=-1)
    numbers = torch.zeros(len(z), dtype=torch.int32) if seq_idx is None else seq_idx[0]
    dt = F.softplus(dt + dt_bias)
    state, outputs = None, []
    for position, number in enumerate(numbers.tolist()):
        if state is None or number != numbers[position - 1]:
            state, begin = torch.zeros(HEADS, CHANNELS, STATE), position
        window = xbc[max(begin, position - 3) : position + 1]
        convolved = F.silu((conv_weight[:, -len(window) :] * window.t()).sum(1) + conv_bias)
        x, b, c = convolved.split([width, STATE, STATE])
        decay = (dt[position] * a).exp()[:, None, None]
        state = decay * state + (dt[position, :, None] * x.view(HEADS, -1))[..., None] * b
        outputs.append((state @ c).flatten() * F.silu(z[position]))
    return torch.stack(outputs)[None]


def rearrange(tensor, pattern):
    """The two patterns of a training pass."""
    return tensor.squeeze(1) if pattern == "d 1 w -> d w" else tensor.transpose(0, 1)


@pytest.fixture
def mixer(monkeypatch, mamba_mixer):
    """Megatron's mixer with a plain kernel, where its packages are not installed."""
    for name, value in {
        "HAVE_MAMBA_SSM": True,
        "HAVE_EINOPS": True,
        "MAMBA_HAS_STATE_DTYPE": False,
        "rearrange": rearrange,
        "mamba_split_conv1d_scan_combined": scan,
        "_check_mamba_sequence_packing_support": lambda **_: (True, None),
    }.items():
        monkeypatch.setattr(mamba_mixer, name, value, raising=False)
    context_parallel = importlib.import_module("megatron.core.ssm.mamba_context_parallel")
    monkeypatch.setattr(context_parallel, "HAVE_EINOPS", True)
    config = small_config(
        mamba_num_heads=HEADS, mamba_head_dim=CHANNELS, mamba_state_dim=STATE, mamba_num_groups=1
    )
    backend = LocalSpecProvider()
    linear = backend.column_parallel_linear(), backend.row_parallel_linear()
    return mamba_mixer.MambaMixer(
        config,
        mamba_mixer.MambaMixerSubmodules(*linear),
        config.hidden_size,
        rmsnorm=False,
        layer_number=1,
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(["tp", "cp"]),
    )


def mixed(mixer, hidden, params):
    with torch.no_grad():
        return mixer(hidden[:, None], packed_seq_params=params)[0][:, 0]


def test_document_one_does_not_affect_document_two(mixer):
    batch = synthetic_batch(seed=3)
    changed, *others = documents_of(batch)
    params = build_packed_seq_params(batch)
    hidden = torch.randn(batch.num_tokens, 32, generator=torch.Generator().manual_seed(1))
    before = mixed(mixer, hidden, params)
    hidden[changed] += 1
    after = mixed(mixer, hidden, params)
    assert (before[changed] - after[changed]).abs().max() > 1e-3
    for other in others:
        assert torch.equal(before[other], after[other])


def test_a_packed_document_equals_the_document_alone(mixer):
    batch = synthetic_batch(seed=4)
    hidden = torch.randn(batch.num_tokens, 32, generator=torch.Generator().manual_seed(2))
    packed = mixed(mixer, hidden, build_packed_seq_params(batch))
    for document in documents_of(batch):
        torch.testing.assert_close(packed[document], mixed(mixer, hidden[document], None))


def test_context_parallel_ranks_number_the_segments_of_the_whole_batch():
    whole = aligned_batch(LENGTHS, 2)
    for batch in (whole, *(slice_for_context_parallel(whole, 2, rank) for rank in range(2))):
        params = build_packed_seq_params(batch)
        if not hasattr(params, "seq_idx"):
            pytest.skip("megatron-core before 0.17 makes them from the ends of the segments")
        ends = params.cu_seqlens_q.tolist()
        assert params.total_tokens == whole.num_tokens == params.seq_idx.shape[1]
        numbers = [n for n, end in enumerate(ends[1:]) for _ in range(end - ends[n])]
        assert params.seq_idx.tolist() == [numbers]
        assert params.seq_idx.dtype == torch.int32


def test_a_megatron_core_whose_state_spaces_ignore_segments_is_refused(mixer, monkeypatch):
    """Megatron-core 0.15."""
    monkeypatch.setattr(step, "_CORE_VERSION", (0, 15))
    model = torch.nn.Sequential(mixer)
    model.config = mixer.config
    with pytest.raises(ConfigError, match="state-space layers .* megatron-core 0.16"):
        forward_step(iter([synthetic_batch(0)]), model)
