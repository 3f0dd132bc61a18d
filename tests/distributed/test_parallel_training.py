# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Two real processes under gloo: tensor, pipeline, expert and data parallel train like one rank.

The processes start once and train under all layouts; the tests compare their results.
"""

import dataclasses
import hashlib
import math

import pytest
import torch
from megatron.core import parallel_state

from energon_ext.errors import SampleError
from energon_ext.megatron import get_batch, make_loss_func, mean_losses
from energon_ext.megatron.context_parallel import context_parallel_positions
from tests.megatron.small_gpt import (
    BALANCED_MOE,
    MOE,
    megatron,
    model_parallel,
    synthetic_batch,
)
from tests.megatron.small_training import STEPS, run_ranks, train
from tests.megatron.test_context_parallel import LENGTHS
from tests.megatron.test_context_parallel import aligned_batch as aligned_documents

TENSOR = {"tensor_model_parallel_size": 2}
SEQUENCE = {"sequence_parallel": True}
PIPELINE = {"pipeline_model_parallel_size": 2}
EXPERT = {"expert_model_parallel_size": 2}
CONTEXT = {"context_parallel_size": 2}


def aligned_batches(step, replica, replicas):
    return [aligned_documents(LENGTHS, 2, seed) for seed in range(4 * step, 4 * step + 4)]


#: Name -> (sizes of model parallelism, configuration of the model, further arguments of train)
LAYOUTS = {
    "aligned, context parallel": (CONTEXT, {}, STEPS, aligned_batches),
    "dense, tensor parallel": (TENSOR, {}),
    "dense, tensor and sequence parallel": (TENSOR, SEQUENCE),
    "dense, pipeline parallel": (PIPELINE, {}),
    "dense, data parallel": ({}, {}),
    "balanced moe, pipeline parallel": (PIPELINE, BALANCED_MOE),
    "balanced moe, expert parallel": (EXPERT, BALANCED_MOE),
    "balanced moe, data parallel": ({}, BALANCED_MOE),
    # Until megatron-core 0.18 an auxiliary loss weighs half as much on two tensor-parallel ranks.
    "moe, tensor and sequence parallel": (TENSOR, {**MOE, **SEQUENCE}),
}


def received_batch():
    """Return hashes of batches that get_batch returns on this rank; one has all optional fields."""
    with model_parallel(**TENSOR):
        batch = synthetic_batch(0)
        batch.log_probs = torch.linspace(-1, 0, batch.num_tokens)
        batch.rewards = torch.arange(len(batch.source_ids)).float()
        batch.cu_seqlens_padded = batch.cu_seqlens.clone()
        batch.columns = {"values": torch.linspace(0, 1, 64)}
        loads = parallel_state.get_tensor_model_parallel_rank() == 0
        found = get_batch(iter([batch]) if loads else None).validate()
        plain = get_batch(iter([synthetic_batch(1)]) if loads else None)
        assert plain.log_probs is None
        assert plain.rewards is None
        longer = get_batch(iter([synthetic_batch(2, rows=20)]) if loads else None)
        return [field_hash(each) for each in (found, plain, longer)]


def field_hash(batch):
    digest = hashlib.sha256()
    for name, value in sorted(vars(batch).items()):
        named = value if isinstance(value, dict) else {name: value}
        for key, each in named.items():
            if isinstance(each, torch.Tensor):
                each = (each.dtype, each.tolist())
            digest.update(repr((name, key, each)).encode())
    return digest.hexdigest()


def failed_draw():
    """Return the error on this rank if tensor-parallel rank 0 cannot draw."""
    with model_parallel(**TENSOR):
        try:
            get_batch(broken_iterator())
        except (SampleError, ZeroDivisionError) as error:
            return f"{type(error).__name__}: {error}"


def broken_iterator():
    yield 1 / 0


def sliced_for_context():
    """Return the part of a batch on this context-parallel rank, and the losses."""
    batch = aligned_batch()
    with model_parallel(context_parallel_size=2):
        here = get_batch(iter([batch]))
        rank = parallel_state.get_context_parallel_rank()
        positions = context_parallel_positions(batch.cu_seqlens_padded, 2, rank)
        report = make_loss_func(here)(position_loss(batch)[positions])[2]
        return {"tokens": here.tokens.tolist(), "losses": mean_losses([report])}


def aligned_batch():
    """Return a batch whose segments, including padding, are multiples of 4 positions."""
    batch = synthetic_batch(0)
    ends = torch.tensor([0, 12, 24, 32, 40, 64], dtype=torch.int32)
    return dataclasses.replace(
        batch,
        cu_seqlens=ends,
        cu_seqlens_padded=ends,
        max_seqlen=24,
        source_ids=torch.tensor([0, 1, 1, 0, 1], dtype=torch.int32),
    ).validate()


def position_loss(batch):
    return torch.linspace(0, 1, batch.num_tokens)


def two_ranks():
    return {
        **{name: train(*layout) for name, layout in LAYOUTS.items()},
        "received batch": received_batch(),
        "failed draw": failed_draw(),
        "context parallel": sliced_for_context(),
    }


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """The results of both ranks: [rank][name]."""
    return run_ranks(2, two_ranks, tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def one_rank_results():
    with megatron():
        parallel_state.destroy_model_parallel()
        return {
            "dense": train({}, {}),
            "aligned": train({}, {}, draw=aligned_batches),
            "moe": train({}, MOE),
            "balanced moe": train({}, BALANCED_MOE),
        }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_train_like_one(layout, ranks, one_rank_results):
    expected = one_rank_results[layout.partition(",")[0]]
    assert expected[-1]["loss"] < expected[0]["loss"] - 0.1
    tolerance = 1e-4 if layout.startswith("moe") else 1e-5
    for step in range(STEPS):
        found = [rank[layout][step] for rank in ranks]
        with_loss = [result for result in found if "loss" in result]
        assert len(with_loss) == (1 if "pipeline" in layout else 2)
        for result in with_loss:
            assert result["loss"] == pytest.approx(expected[step]["loss"], abs=tolerance)
            assert result["loss_by_source"] == pytest.approx(
                expected[step]["loss_by_source"], abs=tolerance
            )
        for result in found:
            assert result["gradient_norm"] == pytest.approx(
                expected[step]["gradient_norm"], rel=tolerance
            )
            assert math.isfinite(result["gradient_norm"])


def test_a_missing_auxiliary_loss_would_show(one_rank_results):
    with_it, without = one_rank_results["balanced moe"], one_rank_results["moe"]
    assert abs(with_it[0]["gradient_norm"] - without[0]["gradient_norm"]) > 1e-3
    assert abs(with_it[-1]["loss"] - without[-1]["loss"]) > 1e-3


def test_context_parallel_ranks_share_a_batch_and_agree_on_its_loss(ranks):
    batch = aligned_batch()
    found = [rank["context parallel"] for rank in ranks]
    held = [
        batch.tokens[context_parallel_positions(batch.cu_seqlens_padded, 2, rank)].tolist()
        for rank in range(2)
    ]
    assert [result["tokens"] for result in found] == held
    assert sorted(held[0] + held[1]) == sorted(batch.tokens.tolist())
    losses, weights = position_loss(batch), batch.token_weights
    for result in found:
        expected = float((losses * weights).sum() / weights.sum())
        assert result["losses"]["loss"] == pytest.approx(expected, abs=1e-6)
        assert set(result["losses"]["loss_by_source"]) == {"code", "web"}


def test_every_rank_receives_the_batch_that_one_drew(ranks):
    full = synthetic_batch(0)
    full.log_probs = torch.linspace(-1, 0, full.num_tokens)
    full.rewards = torch.arange(len(full.source_ids)).float()
    full.cu_seqlens_padded = full.cu_seqlens.clone()
    full.columns = {"values": torch.linspace(0, 1, 64)}
    longer = synthetic_batch(2, rows=20)  # than the first message
    expected = [field_hash(each) for each in (full, synthetic_batch(1), longer)]
    assert [rank["received batch"] for rank in ranks] == [expected, expected]


def test_a_failed_draw_reaches_every_rank_and_none_hangs(ranks):
    assert ranks[0]["failed draw"] == "ZeroDivisionError: division by zero"
    assert ranks[1]["failed draw"].startswith("SampleError: Rank 0 failed to draw a batch")
