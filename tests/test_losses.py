# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The weighted loss and group advantages, by hand and against a slow model in plain Python."""

import math

import pytest
import torch

from energon_ext import ConfigError
from energon_ext.errors import SampleError
from energon_ext.losses import group_advantages, unified_loss


def slow_loss(logits, labels, weights, denominator):
    total, count = 0.0, 0.0
    for row, label, weight in zip(logits.tolist(), labels.tolist(), weights.tolist()):
        if weight == 0:
            continue
        log_sum = math.log(sum(math.exp(value) for value in row))
        total += weight * (log_sum - row[label])
        count += abs(weight) if denominator == "weights" else 1
    return total / max(1.0, count)


@pytest.mark.parametrize(("weight", "loss"), [(1.0, 1.386294), (2.0, 1.386294), (0.0, 0.0)])
def test_uniform_logits_cost_the_log_of_the_vocabulary_size(weight, loss):
    logits, labels = torch.zeros(3, 4), torch.tensor([0, 1, 3])
    assert unified_loss(logits, labels, torch.full((3,), weight)).item() == pytest.approx(
        loss, abs=1e-6
    )


@pytest.mark.parametrize("denominator", ["weights", "tokens"])
def test_the_loss_matches_the_formula(denominator):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(7, 5, generator=generator)
    labels = torch.tensor([0, 4, 2, 1, 3, 0, 2])
    weights = torch.tensor([1.0, 0.5, -2.0, 0.0, 0.25, -0.1, 3.0])
    expected = slow_loss(logits, labels, weights, denominator)
    assert unified_loss(logits, labels, weights, denominator).item() == pytest.approx(expected)


def test_importance_weights_by_hand():
    """Probabilities are now .5 .2 .25 and .5 (weight 0); they were .4 .4 .05 .1 when sampled."""
    logits = torch.tensor([[0.5, 0.5], [0.2, 0.8], [0.25, 0.75], [0.5, 0.5]]).log()
    logits.requires_grad_()
    seen = torch.tensor([0.4, 0.4, 0.05, 0.1]).log()
    weights = torch.tensor([2.0, 1.0, -1.0, 0.0])
    labels = torch.zeros(4, dtype=torch.int64)
    loss = unified_loss(logits, labels, weights, sampler_log_probs=seen, ratio_limit=2.0)
    rho = [1.25, 0.5, 2.0]  # the third is 5, clipped to 2
    expected = (
        2 * rho[0] * -math.log(0.5) + rho[1] * -math.log(0.2) - rho[2] * -math.log(0.25)
    ) / 4
    assert loss.item() == pytest.approx(expected)
    loss.backward()
    # d nll / d logit of the label is p - 1: the weights rho are constants to the gradient
    gradient = [2 * rho[0] * -0.5 / 4, rho[1] * -0.8 / 4, -rho[2] * -0.75 / 4, 0]
    assert logits.grad[:, 0].tolist() == pytest.approx(gradient)
    plain = unified_loss(logits, labels, weights)
    assert unified_loss(logits, labels, weights, sampler_log_probs=seen).item() == plain.item()
    on_policy = torch.log_softmax(logits, -1)[:, 0].detach()
    same = unified_loss(logits, labels, weights, sampler_log_probs=on_policy, ratio_limit=1.5)
    assert same.item() == pytest.approx(plain.item())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ratio_limit": 2.0}, "^ratio_limit: 2.0 found, but no sampler_log_probs"),
        ({"ratio_limit": 0.0, "sampler_log_probs": torch.zeros(1)}, "ratio_limit: 0.0 found, a"),
        ({"ratio_limit": math.nan, "sampler_log_probs": torch.zeros(1)}, "ratio_limit: nan found"),
        ({"ratio_limit": "2", "sampler_log_probs": torch.zeros(1)}, "ratio_limit: '2' found"),
    ],
)
def test_bad_importance_weights_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        unified_loss(torch.zeros(1, 2), torch.zeros(1).long(), torch.ones(1), **options)


def test_a_weight_sum_below_one_does_not_inflate_the_loss():
    logits, labels = torch.zeros(1, 4), torch.tensor([0])
    loss = unified_loss(logits, labels, torch.tensor([0.25]))
    assert loss.item() == pytest.approx(0.25 * math.log(4))


def test_the_denominator_is_the_token_count_or_the_weight_sum():
    logits, labels = torch.zeros(2, 4), torch.tensor([0, 1])
    weights = torch.tensor([1.5, -0.5])
    assert unified_loss(logits, labels, weights).item() == pytest.approx(math.log(4) / 2)
    assert unified_loss(logits, labels, weights, "tokens").item() == pytest.approx(math.log(4) / 2)
    weights = torch.tensor([3.0, 1.0])
    assert unified_loss(logits, labels, weights, "tokens").item() == pytest.approx(2 * math.log(4))
    alone = unified_loss(logits[:1], labels[:1], weights[:1], "tokens")
    assert alone.item() == pytest.approx(3 * math.log(4))


@pytest.mark.parametrize("denominator", ["weights", "tokens"])
def test_weights_of_zero_give_zero_loss_and_zero_gradient(denominator):
    logits = torch.full((2, 4), math.nan, requires_grad=True)
    loss = unified_loss(logits, torch.tensor([-100, 99]), torch.zeros(2), denominator)
    loss.backward()
    assert loss.item() == 0.0
    assert torch.equal(logits.grad, torch.zeros(2, 4))


def test_masked_positions_affect_neither_loss_nor_gradient():
    clean = torch.randn(2, 4, generator=torch.Generator().manual_seed(1))
    logits = torch.cat([clean, torch.full((1, 4), math.inf)]).requires_grad_()
    weights = torch.tensor([1.0, 1.0, 0.0])
    loss = unified_loss(logits, torch.tensor([0, 1, -100]), weights)
    loss.backward()
    assert loss.item() == unified_loss(clean, torch.tensor([0, 1]), weights[:2]).item()
    assert torch.isfinite(logits.grad).all()
    assert not logits.grad[2].any()


def test_half_precision_logits_give_a_float32_loss():
    loss = unified_loss(torch.zeros(1, 4, dtype=torch.bfloat16), torch.tensor([0]), torch.ones(1))
    assert loss.dtype == torch.float32


@pytest.mark.parametrize(
    ("logits", "labels", "weights", "message"),
    [
        (torch.zeros(1, 2, 4), torch.zeros(2).long(), torch.ones(2), r"logits must be \[N, V\]"),
        (torch.zeros(2, 4), torch.zeros(3).long(), torch.ones(2), r"labels must be \[2\]"),
        (torch.zeros(2, 4), torch.zeros(2).long(), torch.ones(2, 1), "token_weights must be"),
        (
            torch.zeros(1, 4),
            torch.zeros(1).long(),
            torch.tensor([math.nan]),
            "^token_weights must be finite, got NaN",
        ),
        (torch.zeros(1, 4), torch.tensor([4]), torch.ones(1), r"\[0, 4\).*got 4..4"),
        (torch.zeros(1, 4), torch.tensor([-1]), torch.ones(1), r"got -1..-1"),
        (
            torch.zeros(1, 4),
            torch.zeros(1).int(),
            torch.ones(1),
            "must be torch.int64, got .*int32",
        ),
    ],
)
def test_bad_inputs_are_named(logits, labels, weights, message):
    with pytest.raises(SampleError, match=message):
        unified_loss(logits, labels, weights)


def test_an_unknown_denominator_is_refused():
    with pytest.raises(ConfigError, match="'mean' found, one of weights, tokens"):
        unified_loss(torch.zeros(1, 4), torch.zeros(1).long(), torch.ones(1), "mean")


def test_advantages_are_centred_and_scaled_by_the_unbiased_deviation():
    assert group_advantages([1, 0, 0, 0]).tolist() == pytest.approx([1.5, -0.5, -0.5, -0.5])
    # mean 3, unbiased variance ((-2)^2 + 0 + 2^2) / 2 = 4
    assert group_advantages(torch.tensor([1.0, 3.0, 5.0])).tolist() == pytest.approx([-1, 0, 1])
    assert group_advantages([1, 0]).dtype == torch.float32


def test_equal_rewards_give_no_advantage():
    assert group_advantages([0.1] * 5).tolist() == pytest.approx([0.0] * 5, abs=1e-6)


def test_a_spread_near_epsilon_gives_small_advantages():
    # The deviation is 1e-8 / sqrt(2): 0.5 / (0.7071 + 1)
    assert group_advantages([1e-8, 0]).tolist() == pytest.approx([0.292893, -0.292893], abs=1e-6)


def test_rewards_are_clipped_before_normalization_and_advantages_after():
    # All are clipped to 1, 0, -1 with mean 0 and deviation 1.
    for rewards in ([7, 0, -1], [1, 0, -7], [7, 0, -7]):
        assert group_advantages(rewards, reward_clip=1).tolist() == pytest.approx([1, 0, -1])
    assert group_advantages([0, 1, 1, 1], advantage_clip=1).tolist() == pytest.approx(
        [-1.0, 0.5, 0.5, 0.5]
    )
    assert group_advantages([1, 0, 0, 0], advantage_clip=1).tolist() == pytest.approx(
        [1.0, -0.5, -0.5, -0.5]
    )


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        ([], r"group_advantages needs the rewards of at least two .* got shape \[0\]"),
        ([1.0], r"at least two samples, \[g\] with g >= 2, got shape \[1\]"),
        ([[1.0, 0.0]], r"got shape \[1, 2\]"),
        ([1.0, math.nan], r"Rewards must be finite, got \[1.0, nan\]"),
        ([math.inf, 0.0], r"Rewards must be finite, got \[inf, 0.0\]"),
    ],
)
def test_invalid_reward_groups_are_refused(rewards, message):
    with pytest.raises(SampleError, match=message):
        group_advantages(rewards)


@pytest.mark.parametrize("clip", [0, -1.0, math.nan])
def test_a_clip_must_be_positive(clip):
    with pytest.raises(ConfigError, match="reward_clip: .* found, a number > 0"):
        group_advantages([1, 0], reward_clip=clip)
    with pytest.raises(ConfigError, match="advantage_clip: .* found, a number > 0"):
        group_advantages([1, 0], advantage_clip=clip)
