# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Losses of policies as functions of a batch, with values worked out by hand."""

import math

import numpy as np
import pytest
import torch

from energon_ext import ConfigError
from energon_ext.batch.collate import BatchAssembler
from energon_ext.batch.rows import Row
from energon_ext.losses import clipped_ratio_losses, reference_kl, unified_loss

RATIOS = [1.5, 1.1, 0.5, 1.5, 0.5, 9.0]
WEIGHTS = [1.0, 2.0, 1.0, -1.0, -1.0, -1.0]


@pytest.fixture
def batch():
    """One answer of six tokens after a prompt of one; the sampler's log-probabilities are -1."""
    values = {
        "ref_log_probs": [0.0, *[-1.0] * 6],
        "response_mask": [0.0, *[1.0] * 6],
        "old_log_probs": [0.0, *[-2.0] * 6],
    }
    row = Row(
        [np.arange(7)],
        slice_sources=["web"],
        label_weights=[np.array([0.0, *WEIGHTS])],
        log_probs=[np.array([0.0, *[-1.0] * 6])],
        columns={name: [np.array(each)] for name, each in values.items()},
    )
    return BatchAssembler(8)([row], sources=["web"])


def current(batch, base=-1.0):
    """Return log-probabilities with the ratios above; unlikely ones where nothing is trained."""
    log_probs = torch.full((8,), -math.inf)
    log_probs[:6] = torch.tensor(RATIOS).log() + base
    return log_probs.requires_grad_()


def test_clipped_ratios(batch):
    log_probs = current(batch)
    losses = clipped_ratio_losses(batch, log_probs, 0.2)
    assert losses.tolist() == pytest.approx([-1.2, -2.2, -0.5, 1.5, 0.8, 9.0, 0, 0])
    losses.sum().backward()
    # Only where the ratio may still move: the gradient is -w * rho.
    assert log_probs.grad.tolist() == pytest.approx([0, -2.2, -0.5, 1.5, 0, 9.0, 0, 0])


def test_clips_above_and_of_negative_advantages(batch):
    log_probs = current(batch, base=-2.0)
    old = batch.columns["old_log_probs"]
    losses = clipped_ratio_losses(
        batch, log_probs, 0.2, clip_high=0.28, dual_clip=3.0, old_log_probs=old
    )
    assert losses.tolist() == pytest.approx([-1.28, -2.2, -0.5, 1.5, 0.8, 3.0, 0, 0])


def test_without_a_step_the_gradient_is_that_of_the_unified_loss(batch):
    logits = torch.randn(8, 7, generator=torch.Generator().manual_seed(0)).requires_grad_()
    log_probs = torch.log_softmax(logits, -1).gather(1, batch.labels[:, None])[:, 0]
    batch.log_probs = log_probs.detach()
    (found,) = torch.autograd.grad(clipped_ratio_losses(batch, log_probs).sum() / 6, logits)
    loss = unified_loss(logits, batch.labels, batch.token_weights, "tokens")
    (expected,) = torch.autograd.grad(loss, logits)
    assert torch.allclose(found, expected, atol=1e-7)


def test_divergence_from_a_reference(batch):
    log_probs = current(batch)
    expected = [*map(math.log, RATIOS), 0, 0]
    assert reference_kl(batch, log_probs, "k1").tolist() == pytest.approx(expected, abs=1e-6)
    k3 = reference_kl(batch, log_probs)
    expected = [1 / ratio - 1 + math.log(ratio) for ratio in RATIOS]
    assert k3.tolist() == pytest.approx([*expected, 0, 0], abs=1e-6)
    k3.sum().backward()
    expected = [1 - 1 / ratio for ratio in RATIOS]
    assert log_probs.grad.tolist() == pytest.approx([*expected, 0, 0], abs=1e-6)
    shifted = reference_kl(batch, log_probs, "k1", reference=torch.full((8,), -3.0))
    assert shifted[1].item() == pytest.approx(math.log(1.1) + 2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda b, x: clipped_ratio_losses(b, x, 0), "clip: 0 found"),
        (lambda b, x: clipped_ratio_losses(b, x, clip_high=-1), "clip_high: -1 found"),
        (lambda b, x: clipped_ratio_losses(b, x, dual_clip=0), "dual_clip: 0 found"),
        (lambda b, x: reference_kl(b, x, "k2"), "estimator: 'k2' found"),
    ],
)
def test_bad_arguments_are_refused(batch, call, message):
    with pytest.raises(ConfigError, match=message):
        call(batch, current(batch))


def test_missing_columns_are_named(batch):
    del batch.columns["ref_log_probs"]
    batch.log_probs = None
    with pytest.raises(ConfigError, match=r"\['response_mask', 'old_log_probs'\], ref_log_probs"):
        reference_kl(batch, current(batch))
    with pytest.raises(ConfigError, match="no log_probs; give old_log_probs"):
        clipped_ratio_losses(batch, current(batch))
