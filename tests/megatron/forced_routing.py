# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Batches with experts, and an independent model: its routers are replaced by hand."""

import functools

import numpy as np
import pytest
import torch
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer.transformer_config import TransformerConfig

from energon_ext.megatron import forward_step
from energon_ext.megatron.moe import unwrap
from tests.megatron.small_gpt import MOE, synthetic_batch

#: The option is no field of the configuration of megatron-core 0.15.
CAN_REPLAY = hasattr(TransformerConfig, "moe_enable_routing_replay")
NEEDS_REPLAY = pytest.mark.skipif(
    not CAN_REPLAY, reason="routers of megatron-core 0.15 cannot be told what to choose"
)

REPLAYED_MOE = {**MOE, "moe_enable_routing_replay": True}

#: Activation checkpoints around each whole layer.
WHOLE_LAYERS = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}

replaying_step = functools.partial(forward_step, experts="experts")


def with_experts(batch, layers, seed=0):
    """Give a batch two different experts for each token and layer; some tokens have none."""
    random = np.random.default_rng(seed)
    count, topk = MOE["num_moe_experts"], MOE["moe_router_topk"]
    experts = random.random((batch.num_tokens, layers, count)).argsort(-1)[..., :topk]
    has_none = batch.padding_mask().numpy() | (random.random(batch.num_tokens) < 0.2)
    experts[has_none] = -1
    batch.columns = {"experts": torch.from_numpy(experts.astype(np.int16))}
    return batch


def batches_with_experts(step, replica, replicas, layers=4, make=synthetic_batch):
    """Return the micro-batches of a replica in a step: four in all replicas together."""
    seeds = range(step * 4 + replica, (step + 1) * 4, replicas)
    return [with_experts(make(seed), layers, seed) for seed in seeds]


def recompute_without_gpu(set_attribute=setattr):
    """Let Megatron's activation checkpoints keep no random state of a GPU."""
    set_attribute(megatron_random, "_get_cuda_rng_state", lambda **_: None)
    set_attribute(megatron_random, "_set_cuda_rng_state", lambda *_, **__: None)


def forced_step(data_iterator, model):
    """Run a micro-batch as forward_step does, with routers that are replaced by hand."""
    batch = next(data_iterator)
    for number, layer in enumerate(unwrap(model).decoder.layers):
        if hasattr(layer.mlp, "router"):
            experts = batch.columns["experts"][:, number].long()
            layer.mlp.router.routing = functools.partial(_route, experts)
    return forward_step(iter([batch]), model)


def _route(experts, logits, *_, **__):
    """Return the probabilities and the map of given experts: softmax over the chosen ones."""
    logits = logits.flatten(0, 1)
    is_chosen = torch.zeros_like(logits, dtype=torch.bool)
    for token, chosen in enumerate(experts.tolist()):
        if chosen[0] < 0:
            chosen = logits[token].topk(len(chosen)).indices.tolist()
        is_chosen[token, chosen] = True
    return logits.masked_fill(~is_chosen, -torch.inf).softmax(-1), is_chosen
