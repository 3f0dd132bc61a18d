# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Answers with masks, weights and columns train the same packed into rows and one by one."""

import functools

import pytest
import torch

from energon_ext.batch.collate import BatchAssembler
from energon_ext.losses import clipped_ratio_losses, reference_kl
from energon_ext.megatron import forward_step
from energon_ext.rl import ScoredGroup
from energon_ext.rl.group_rows import WaitingGroup, arrange, build_row
from energon_ext.rl.scoring import Scoring
from tests.megatron.small_gpt import small_config, small_model
from tests.megatron.small_training import run_schedule

pytestmark = pytest.mark.usefixtures("one_rank")


def group_of(seed):
    """Return three answers of two to six tokens, with all optional fields."""
    random = torch.Generator().manual_seed(seed)
    prompts, lengths = torch.tensor([2, 3, 2]), torch.tensor([6, 2, 4])
    per_token = [torch.rand(3, 6, generator=random) for _ in range(4)]
    log_probs, reference, mask, advantages = per_token
    return ScoredGroup(
        tokens=torch.randint(4, 60, (3, 8), generator=random),
        log_probs=log_probs - 4.5,
        rewards=torch.rand(3, generator=random),
        prompt_len=prompts,
        response_lens=lengths,
        response_mask=mask > 0.3,
        advantages=advantages - 0.5 if seed else None,
        sample_weights=torch.tensor([1.0, 0.5, 0.0]),
        columns={"ref_log_probs": reference - 4.5},
    )


def ppo(batch, log_probs):
    return clipped_ratio_losses(batch, log_probs, 0.2) + 0.5 * reference_kl(batch, log_probs)


def gradients(rows, seq_len):
    """Return the gradient of the sum over the positions of all rows, and their number."""
    batches = [BatchAssembler(seq_len)([row], sources=["web"]).validate() for row in rows]
    model = small_model(small_config())
    step = functools.partial(forward_step, position_losses=ppo, denominator="responses")
    run_schedule(model, batches, step)
    count = sum(float(batch.columns["response_mask"].sum()) for batch in batches)
    return [parameter.grad.clone() for parameter in model.parameters()], count


def test_packed_answers_give_the_gradients_of_single_ones():
    groups = [WaitingGroup(seed, f"p{seed}", "web", group_of(seed), 0, 0) for seed in (0, 1)]
    weights = Scoring(advantages="rloo").weigh([waiting.group for waiting in groups])
    packed = [build_row(groups, weights, each) for each in arrange(groups, 2, 24)]
    assert sorted(len(row.slices) for row in packed) == [3, 3]
    single = [
        build_row(groups, weights, [(index, sample)]) for index in (0, 1) for sample in range(3)
    ]
    found, count = gradients(packed, 24)
    expected, count_of_single = gradients(single, 8)
    assert count == count_of_single > 8
    assert max(float(each.abs().max()) for each in expected) > 1e-2
    for each, wanted in zip(found, expected):
        assert torch.allclose(each, wanted, atol=1e-6)
