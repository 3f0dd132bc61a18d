# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Routers see documents only; their losses weigh the same whatever scales the token count."""

import dataclasses
import functools

import pytest
import torch

from energon_ext import ConfigError
from energon_ext.megatron import forward_step, scale_router_losses
from tests.megatron.small_gpt import (
    BALANCED_MOE,
    MOE,
    ROUTERS_TAKE_A_MASK,
    small_config,
    small_model,
    synthetic_batch,
)
from tests.megatron.small_training import run_schedule

pytestmark = pytest.mark.usefixtures("one_rank")


def gradients(model, batches, **options):
    """Return the gradients of a step as the optimizer gets them: divided by the count."""
    counts = []
    model.config.finalize_model_grads_func = lambda model, count, **_: counts.append(count)
    model.zero_grad()
    run_schedule(model, batches, functools.partial(forward_step, **options))
    return {name: p.grad / counts[0] for name, p in model.named_parameters()}


def without_padding(batch):
    """The documents of a batch alone."""
    documents, segments = ~batch.padding_mask(), batch.source_ids >= 0
    ends = torch.cat([torch.zeros(1), batch.segment_lengths()[segments].cumsum(0)])
    fields = ("tokens", "labels", "token_weights", "position_ids")
    return dataclasses.replace(
        batch,
        **{name: getattr(batch, name)[documents] for name in fields},
        cu_seqlens=ends.to(torch.int32),
        source_ids=batch.source_ids[segments],
        max_seqlen=int(ends.diff().max()),
    ).validate()


@pytest.mark.skipif(not ROUTERS_TAKE_A_MASK, reason="routers of megatron-core 0.15 take no mask")
@pytest.mark.parametrize("losses", ["auxiliary loss", "z loss"])
def test_padding_does_not_affect_routers(losses):
    config = BALANCED_MOE if losses == "auxiliary loss" else {**MOE, "moe_z_loss_coeff": 0.5}
    batches = [synthetic_batch(seed) for seed in (1, 4)]
    assert all(batch.padding_mask().any() for batch in batches)
    packed = gradients(small_model(small_config(**config)), batches)
    alone = gradients(small_model(small_config(**config)), [*map(without_padding, batches)])
    for name, gradient in alone.items():
        torch.testing.assert_close(packed[name], gradient, rtol=1e-4, atol=1e-6)
    plain = gradients(small_model(small_config(**MOE)), batches)
    router = "decoder.layers.0.mlp.router.weight"
    assert (plain[router] - packed[router]).abs().max() > 1e-3


@pytest.mark.skipif(not ROUTERS_TAKE_A_MASK, reason="routers of megatron-core 0.15 take no mask")
def test_the_mask_marks_padding():
    model = small_model(small_config(**BALANCED_MOE))
    batch = synthetic_batch(4)
    routed = []
    router = model.decoder.layers[0].mlp.router
    router.register_forward_pre_hook(lambda module, args: routed.append(args[1]))
    forward_step(iter([batch]), model)
    assert routed[0][:, 0].tolist() == batch.padding_mask().tolist()


@pytest.mark.parametrize(
    "config", [BALANCED_MOE, {**MOE, "moe_z_loss_coeff": 0.5}], ids=["auxiliary loss", "z loss"]
)
def test_router_losses_weigh_the_same_with_and_without_a_weight_scale(config):
    batches = [synthetic_batch(seed) for seed in (1, 4)]
    plain = gradients(small_model(small_config(**config)), batches)
    scaled_config = small_config(**config)
    scale_router_losses(scaled_config, 64)
    scaled = gradients(small_model(scaled_config), batches, weight_scale=64)
    for name, gradient in plain.items():
        torch.testing.assert_close(scaled[name], gradient, rtol=1e-4, atol=1e-6)


def test_a_weight_scale_unknown_to_the_routers_is_refused():
    with pytest.raises(ConfigError, match=r"call scale_router_losses\(config, 64\)"):
        forward_step(iter([]), small_model(small_config(**BALANCED_MOE)), weight_scale=64)
    config = small_config(**BALANCED_MOE)
    scale_router_losses(config, 64)
    with pytest.raises(ConfigError, match="weight_scale=1, but .* are scaled by 64"):
        forward_step(iter([]), small_model(config))
    with pytest.raises(ConfigError, match="already scaled by 64"):
        scale_router_losses(config, 64)


@pytest.mark.parametrize("config", [{}, MOE], ids=["dense", "routers without a loss"])
def test_without_router_losses_any_weight_scale_works(config):
    output, _ = forward_step(
        iter([synthetic_batch(0)]), small_model(small_config(**config)), weight_scale=64
    )
    assert output.isfinite().all()


def test_every_coefficient_of_a_list_is_scaled():
    config = small_config(
        **{
            **MOE,
            "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"],
            "moe_aux_loss_coeff": [0.5, 0.25],
            "moe_z_loss_coeff": 0.125,
        }
    )
    scale_router_losses(config, 8)
    assert config.moe_aux_loss_coeff == [4.0, 2.0]
    assert config.moe_z_loss_coeff == 1.0
