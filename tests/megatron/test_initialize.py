# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Weights come from seed and name; tests/distributed shows that no split changes them."""

import math

import pytest
import torch

from tests.megatron.example_code import initialize_weights
from tests.megatron.small_gpt import MOE, small_config, small_model

pytestmark = pytest.mark.usefixtures("one_rank")

QKV = "decoder.layers.{}.self_attention.linear_qkv.weight"
PROJECTION = "decoder.layers.{}.self_attention.linear_proj.weight"


def weights(seed=0, **config):
    return small_model(small_config(**config), seed).state_dict()


def test_a_weight_depends_on_seed_and_name_alone():
    two_layers, four_layers = weights(num_layers=2), weights(num_layers=4)
    assert torch.equal(two_layers[QKV.format(1)], four_layers[QKV.format(1)])
    assert not torch.equal(two_layers[QKV.format(0)], two_layers[QKV.format(1)])
    assert not torch.equal(two_layers[QKV.format(0)], weights(seed=1)[QKV.format(0)])


def test_existing_weights_are_replaced():
    model = small_model(small_config())
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    torch.nn.init.ones_(model.output_layer.weight)
    initialize_weights(model, seed=0)
    for name, weight in model.named_parameters():
        assert torch.equal(weight, before[name])


def test_projections_into_the_residual_stream_are_smaller_and_norms_are_one():
    drawn = weights(num_layers=8, hidden_size=64, init_method_std=0.5)
    assert drawn[QKV.format(3)].std().item() == pytest.approx(0.5, rel=0.05)
    expected = 0.5 / math.sqrt(2 * 8)
    assert drawn[PROJECTION.format(3)].std().item() == pytest.approx(expected, rel=0.05)
    assert torch.equal(drawn["decoder.final_layernorm.weight"], torch.ones(64))


def test_experts_differ_from_each_other():
    drawn = weights(**MOE)
    name = "decoder.layers.0.mlp.experts.local_experts.{}.linear_fc1.weight"
    assert not torch.equal(drawn[name.format(0)], drawn[name.format(1)])
