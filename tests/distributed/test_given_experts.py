# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Given experts under every kind of parallelism: four ranks train like a router forced by hand."""

import functools
import itertools

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func

from energon_ext.megatron.rank_data import rank_data
from tests.megatron.forced_routing import (
    NEEDS_REPLAY,
    REPLAYED_MOE,
    WHOLE_LAYERS,
    batches_with_experts,
    forced_step,
    recompute_without_gpu,
    replaying_step,
)
from tests.megatron.small_gpt import MOE, megatron, model_parallel, small_config, small_model
from tests.megatron.small_training import STEPS, run_ranks, train
from tests.megatron.test_context_parallel import LENGTHS
from tests.megatron.test_context_parallel import aligned_batch as aligned_documents

pytestmark = [pytest.mark.nightly, NEEDS_REPLAY]

TENSOR = {"tensor_model_parallel_size": 2}
PIPELINE = {"pipeline_model_parallel_size": 2}
EXPERT = {"expert_model_parallel_size": 2}
CONTEXT = {"context_parallel_size": 2}
SEQUENCE = {"sequence_parallel": True}
DENSE_LAYER = {"moe_layer_freq": [1, 0, 1, 1]}
EXPERTS_ONLY = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}

aligned_batches = functools.partial(
    batches_with_experts, make=lambda seed: aligned_documents(LENGTHS, 2, seed)
)


def aligned_whole_batches(step, replica, replicas):
    return aligned_batches(step, 0, 1)


#: Name -> (sizes of model parallelism, configuration of the model, micro-batches)
LAYOUTS = {
    "plain, 4 stages": ({"pipeline_model_parallel_size": 4}, WHOLE_LAYERS),
    "plain, tensor parallel in 2 stages": ({**TENSOR, **PIPELINE}, {**SEQUENCE, **EXPERTS_ONLY}),
    "plain, expert parallel in 2 stages": ({**EXPERT, **PIPELINE}, WHOLE_LAYERS),
    "plain, tensor and expert parallel": ({**TENSOR, **EXPERT}, SEQUENCE),
    "dense layer, 2 stages": (PIPELINE, {**DENSE_LAYER, **WHOLE_LAYERS}),
    "aligned, context parallel in 2 stages": ({**CONTEXT, **PIPELINE}, WHOLE_LAYERS),
    "aligned, context and tensor parallel": ({**CONTEXT, **TENSOR}, SEQUENCE),
    "aligned, context and expert parallel": ({**CONTEXT, **EXPERT}, {}),
}

KINDS = {
    "plain": ({}, batches_with_experts),
    "dense layer": (DENSE_LAYER, batches_with_experts),
    "aligned": ({}, aligned_batches),
}


def train_layout(name):
    sizes, config = LAYOUTS[name]
    draw = KINDS[name.partition(",")[0]][1]
    if sizes.get("context_parallel_size"):
        draw = aligned_whole_batches
    config = {**REPLAYED_MOE, "num_layers": 4, **config}
    return train(sizes, config, STEPS, draw, replaying_step)


def gradients_of_layers(sizes, config, step):
    """Return the norm of each layer's gradient after micro-batches through virtual stages."""
    with model_parallel(**sizes):
        config = small_config(**sizes, **config, num_layers=8)
        stages = [*range(sizes.get("virtual_pipeline_model_parallel_size", 1))]
        models = [small_model(config, vp_stage=stage if sizes else None) for stage in stages]
        batches = batches_with_experts(0, 0, 1, layers=8)
        get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=list(itertools.tee(iter(batches), len(stages))),
            model=models,
            num_microbatches=len(batches),
            seq_length=batches[0].num_tokens,
            micro_batch_size=1,
            forward_only=False,
        )
        assert not any(rank_data().recomputed.values())
        return {
            str(layer.layer_number): torch.cat([p.grad.flatten() for p in layer.parameters()])
            .norm()
            .item()
            for model in models
            for layer in model.decoder.layers
        }


#: Between two ranks alone, gloo would mix up what goes to the next stage and to the one before.
VIRTUAL = {"pipeline_model_parallel_size": 4, "virtual_pipeline_model_parallel_size": 2}


def four_ranks():
    recompute_without_gpu()
    results = {name: train_layout(name) for name in LAYOUTS}
    config = {**REPLAYED_MOE, **WHOLE_LAYERS}
    results["virtual stages"] = gradients_of_layers(VIRTUAL, config, replaying_step)
    return results


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_ranks(4, four_ranks, tmp_path_factory.mktemp("ranks"))


@functools.cache
def alone(kind):
    config, draw = KINDS[kind]
    with megatron():
        parallel_state.destroy_model_parallel()
        return train({}, {**MOE, "num_layers": 4, **config}, STEPS, draw, forced_step)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_with_given_experts_trains_like_a_router_forced_by_hand(layout, ranks):
    expected = alone(layout.partition(",")[0])
    assert expected[-1]["loss"] < expected[0]["loss"]
    for rank in ranks:
        for step, found in enumerate(rank[layout]):
            for name, value in found.items():
                assert value == pytest.approx(expected[step][name], rel=1e-4)
    assert any("loss" in rank[layout][0] for rank in ranks)


def test_virtual_stages_that_recompute_their_layers_have_the_gradients_of_a_forced_router(ranks):
    with megatron():
        parallel_state.destroy_model_parallel()
        expected = gradients_of_layers({}, MOE, forced_step)
    assert len(expected) == 8
    found = {name: value for rank in ranks for name, value in rank["virtual stages"].items()}
    assert found == pytest.approx(expected, rel=1e-4)
