# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Losses in chunks of positions, against logits of all positions in double precision."""

import pytest
import torch

from energon_ext import ConfigError
from energon_ext.errors import SampleError
from energon_ext.losses.chunked import chunked_log_probs, chunked_loss

POSITIONS, HIDDEN, WORDS = 23, 8, 17
RATIOS = {"ratio_limit": 1.5}
OPTIONS = [{}, {"denominator": "tokens"}, RATIOS, {**RATIOS, "denominator": "tokens"}]


def inputs(seed=0):
    random = torch.Generator().manual_seed(seed)
    hidden = torch.randn(POSITIONS, HIDDEN, generator=random)
    weight = torch.randn(WORDS, HIDDEN, generator=random)
    labels = torch.randint(WORDS, (POSITIONS,), generator=random)
    # masked, raised and lowered positions, and fractions
    weights = torch.randn(POSITIONS, generator=random) * (torch.arange(POSITIONS) % 4 != 1)
    sampled = -3 * torch.rand(POSITIONS, generator=random)
    return hidden, weight, labels, weights, sampled


def dense_loss(hidden, weight, labels, weights, sampled, denominator="weights", ratio_limit=None):
    """The formula, with logits of all positions, in double precision."""
    log_probs = torch.log_softmax(hidden @ weight.T, -1).gather(1, labels[:, None])[:, 0]
    terms = -weights.double() * log_probs
    if ratio_limit is not None:
        terms = terms * (log_probs.detach() - sampled.double()).exp().clamp(max=ratio_limit)
    return terms.sum() / (weights.abs().sum() if denominator == "weights" else (weights != 0).sum())


def assert_close(found, expected):
    scale = expected.abs().max()
    assert scale > 0
    assert (found.double() - expected).abs().max() <= 1e-6 * scale


@pytest.mark.parametrize("chunk", [1, 5, 23, 100])
@pytest.mark.parametrize("options", OPTIONS)
def test_loss_and_gradients_equal_those_of_all_logits_in_double_precision(options, chunk):
    hidden, weight, labels, weights, sampled = inputs()
    wide = [each.double().requires_grad_() for each in (hidden, weight)]
    expected = dense_loss(*wide, labels, weights, sampled, **options)
    expected.backward()
    hidden.requires_grad_()
    weight.requires_grad_()
    given = {"sampler_log_probs": sampled} if "ratio_limit" in options else {}
    loss = chunked_loss(hidden, weight, labels, weights, chunk=chunk, **options, **given)
    loss.backward()
    assert_close(loss.detach(), expected.detach())
    assert_close(hidden.grad, wide[0].grad)
    assert_close(weight.grad, wide[1].grad)


def test_log_probabilities_serve_losses_by_position():
    hidden, weight, labels, _, _ = inputs(1)
    upstream = torch.linspace(-1, 1, POSITIONS)
    wide = [each.double().requires_grad_() for each in (hidden, weight)]
    expected = torch.log_softmax(wide[0] @ wide[1].T, -1).gather(1, labels[:, None])[:, 0]
    (expected * upstream).sum().backward()
    hidden.requires_grad_()
    found = chunked_log_probs(hidden, weight.requires_grad_(), labels, chunk=4)
    (found * upstream).sum().backward()
    assert_close(found.detach(), expected.detach())
    assert_close(hidden.grad, wide[0].grad)
    assert_close(weight.grad, wide[1].grad)


def test_an_output_layer_may_have_a_bias_and_a_soft_cap():
    hidden, weight, labels, weights, _ = inputs(2)
    layer = torch.nn.Linear(HIDDEN, WORDS)
    wide = [each.detach().double().requires_grad_() for each in (layer.weight, layer.bias)]
    logits = 3 * torch.tanh((hidden.double() @ wide[0].T + wide[1]) / 3)
    log_probs = torch.log_softmax(logits, -1).gather(1, labels[:, None])[:, 0]
    (-(weights * log_probs).sum() / weights.abs().sum()).backward()

    def output(hidden):
        return 3 * torch.tanh(layer(hidden) / 3)

    chunked_loss(hidden, output, labels, weights, chunk=6).backward()
    assert_close(layer.weight.grad, wide[0].grad)
    assert_close(layer.bias.grad, wide[1].grad)


def test_no_chunk_has_the_logits_of_more_positions_and_masked_ones_have_none():
    hidden, weight, labels, weights, _ = inputs(3)
    seen = []

    def output(hidden):
        seen.append(len(hidden))
        return hidden @ weight.T

    loss = chunked_loss(hidden.requires_grad_(), output, labels, weights, chunk=5)
    forward = [5] * 3 + [2]
    assert (weights != 0).sum() == sum(forward)
    assert seen == forward
    loss.backward()
    assert sorted(seen[4:]) == sorted(forward)  # once more, for the gradient


def test_without_a_trained_position_loss_and_gradient_are_zero():
    hidden, weight, labels, weights, _ = inputs()
    hidden[:] = torch.inf
    loss = chunked_loss(hidden.requires_grad_(), weight, labels, 0 * weights)
    loss.backward()
    assert loss.item() == 0
    assert not hidden.grad.any()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"chunk": 0}, ConfigError, "chunk: 0 found, an integer >= 1"),
        ({"denominator": "rows"}, ConfigError, "denominator: 'rows' found"),
        ({"ratio_limit": 2.0}, ConfigError, "no sampler_log_probs"),
        ({"labels": torch.full((POSITIONS,), WORDS)}, SampleError, r"labels must be in \[0, 17\)"),
        ({"hidden": torch.zeros(2, 3, 4)}, SampleError, r"hidden states \[N, H\]"),
        (
            {"sampler_log_probs": torch.zeros(1), "ratio_limit": 2.0},
            SampleError,
            r"sampler_log_probs must be \[23\] like the logits, got \[1\]",
        ),
    ],
)
def test_what_does_not_fit_is_refused(change, error, message):
    hidden, weight, labels, weights, _ = inputs()
    given = {"hidden": hidden, "labels": labels, "token_weights": weights, **change}
    with pytest.raises(error, match=message):
        chunked_loss(output=weight, **given)


def test_a_label_of_minus_100_is_refused_and_not_left_out_by_torch():
    hidden, weight, labels, weights, _ = inputs()
    labels[weights.nonzero()[0]] = -100
    for output in (weight, lambda hidden: hidden @ weight.T):
        for function, further in ((chunked_loss, [weights]), (chunked_log_probs, [])):
            with pytest.raises(SampleError, match=r"labels must be .*got -100\.\."):
                function(hidden, output, labels, *further)
