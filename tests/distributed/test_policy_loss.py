# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Advantages as weights on two processes: the loss equals one formula over the global batch.

The expected values come from plain autograd of :func:`energon_ext.unified_loss` over the logits of
the whole global batch, without Megatron's schedules, wrappers or counts.
"""

import dataclasses
import functools
import math

import pytest
import torch
from megatron.core import parallel_state

from energon_ext.losses import clipped_ratio_losses, reference_kl, unified_loss
from energon_ext.megatron import forward_step, mean_losses
from tests.megatron.small_gpt import (
    megatron,
    model_parallel,
    run_packed,
    small_config,
    small_model,
    synthetic_batch,
)
from tests.megatron.small_training import SGD, run_ranks, run_schedule, trainable

MICRO_BATCHES = 4
PIPELINE = {"pipeline_model_parallel_size": 2}
TENSOR = {"tensor_model_parallel_size": 2}
LAYOUTS = {"data parallel": {}, "pipeline parallel": PIPELINE, "tensor parallel": TENSOR}
SCALE = {"weight_scale": 1 << 14}
TOKENS = {"denominator": "tokens"}


def ppo_with_a_reference(batch, log_probs):
    return clipped_ratio_losses(batch, log_probs, 0.2) + 0.5 * reference_kl(batch, log_probs)


PPO = {"position_losses": ppo_with_a_reference, "denominator": "responses"}

#: Name -> (factors of the weights, options of forward_step)
CASES = {
    "advantages by weight": ([-0.7, 0.9, 1.3, -0.25], SCALE),
    "advantages by token": ([-0.7, 0.9, 1.3, -0.25], TOKENS),
    "only negative": ([-0.5], SCALE),
    "one micro-batch without a trained token": ([0.0, 0.9, 1.3, -0.25], SCALE),
    "nothing to train": ([0.0], SCALE),
    "nothing to train, by token": ([0.0], TOKENS),
    # Every other token has no advantage, but is held near the reference.
    "clipped ratios and a reference": ([-0.7, 0.0, 1.3, 0.0], PPO),
}


def batch(case, index):
    """Return micro-batch ``index``; its weights change from one position to the next."""
    factors, _ = CASES[case]
    plain = synthetic_batch(index)
    if index == 1 and case.startswith("one micro-batch"):
        return dataclasses.replace(plain, token_weights=torch.zeros(plain.num_tokens))
    # Micro-batches also differ in size, so that a mean of means would be wrong.
    pattern = torch.tensor(factors) * (1 + index)
    weights = pattern.repeat(plain.num_tokens // len(factors) + 1)[: plain.num_tokens]
    plain = dataclasses.replace(plain, token_weights=plain.token_weights * weights)
    if CASES[case][1] is not PPO:
        return plain
    uniform = torch.full((plain.num_tokens,), -math.log(64))  # about what the model says
    return dataclasses.replace(
        plain,
        log_probs=uniform + torch.linspace(-1, 1, plain.num_tokens),
        columns={
            "ref_log_probs": uniform + torch.linspace(0.5, -0.5, plain.num_tokens),
            "response_mask": (synthetic_batch(index).token_weights != 0).float(),
        },
    )


def step(case, sizes):
    """Return loss and gradient norm of one step; no loss on ranks that do not compute it."""
    model, optimizer = trainable(small_config(**sizes), clip_grad=1.0, **SGD)
    replicas = parallel_state.get_data_parallel_world_size()
    own = range(parallel_state.get_data_parallel_rank(), MICRO_BATCHES, replicas)
    batches = [batch(case, index) for index in own]
    reports = run_schedule(model, batches, functools.partial(forward_step, **CASES[case][1]))
    _, gradient_norm, _ = optimizer.step()
    parameters_are_finite = all(bool(p.isfinite().all()) for p in model.parameters())
    return {**mean_losses(reports), "norm": gradient_norm, "finite": parameters_are_finite}


def expected_step(case):
    """Return loss and gradient norm by the formula."""
    model = small_model(small_config())
    batches = [batch(case, index) for index in range(MICRO_BATCHES)]
    logits = [run_packed(model, found) for found in batches]
    labels = torch.cat([found.labels for found in batches])
    weights = torch.cat([found.token_weights for found in batches])
    if CASES[case][1] is PPO:
        loss = ppo_by_hand(torch.cat(logits), labels, weights, batches)
    else:
        denominator = CASES[case][1].get("denominator", "weights")
        loss = unified_loss(torch.cat(logits), labels, weights, denominator)
    loss.backward()
    squares = [p.grad.double().square().sum().item() for p in model.parameters()]
    return loss.item(), math.sqrt(sum(squares))


def ppo_by_hand(logits, labels, weights, batches):
    """Add up the loss position by position."""
    log_probs = torch.log_softmax(logits, -1).gather(1, labels[:, None])[:, 0]
    old = torch.cat([found.log_probs for found in batches])
    reference = torch.cat([found.columns["ref_log_probs"] for found in batches])
    mask = torch.cat([found.columns["response_mask"] for found in batches])
    losses, clipped = [], 0
    for now, before, there, weight, counts in zip(log_probs, old, reference, weights, mask):
        if counts:
            ratio = (now - before).exp()
            inside = min(max(ratio, torch.tensor(0.8)), torch.tensor(1.2))
            clipped += bool(inside != ratio)
            divergence = (there - now).exp() - 1 - (there - now)
            losses.append(-min(weight * ratio, weight * inside) + 0.5 * divergence)
    assert 0 < clipped < len(losses)
    return sum(losses) / len(losses)


def all_steps():
    results = {}
    for layout, sizes in LAYOUTS.items():
        with model_parallel(**sizes):
            results[layout] = {case: step(case, sizes) for case in CASES}
    return results


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_ranks(2, all_steps, tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def expected():
    with megatron():
        return {case: expected_step(case) for case in CASES}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", CASES)
def test_two_ranks_match_the_loss_and_gradient_of_the_formula(case, layout, ranks, expected):
    loss, norm = expected[case]
    found = [rank[layout][case] for rank in ranks]
    with_loss = [result["loss"] for result in found if "loss" in result]
    assert len(with_loss) == (1 if layout == "pipeline parallel" else 2)
    assert with_loss == pytest.approx([loss] * len(with_loss), abs=2e-5)
    for result in found:
        assert result["finite"]
        assert result["norm"] == pytest.approx(norm, rel=1e-3, abs=1e-7)


def test_the_cases_differ(expected):
    assert expected["nothing to train"] == (0.0, 0.0)
    assert expected["only negative"][0] < -1
    losses = [expected[case][0] for case in list(CASES)[:4]]
    assert min(abs(a - b) for i, a in enumerate(losses) for b in losses[:i]) > 1e-3
