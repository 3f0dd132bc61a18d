# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Routers choose the experts of a batch's column, also when layers are recomputed."""

import functools

import pytest
import torch

from energon_ext import ConfigError
from energon_ext.megatron import create_broadcast_groups, forward_step
from energon_ext.megatron.rank_data import rank_data
from energon_ext.megatron.routing_replay import check_replayable
from tests.megatron.forced_routing import (
    NEEDS_REPLAY,
    REPLAYED_MOE,
    WHOLE_LAYERS,
    forced_step,
    recompute_without_gpu,
    replaying_step,
    with_experts,
)
from tests.megatron.small_gpt import MOE, small_config, small_model, synthetic_batch

pytestmark = [pytest.mark.usefixtures("one_rank"), NEEDS_REPLAY]

ONE_LAYER = {**WHOLE_LAYERS, "recompute_method": "block"}
EXPERTS_ONLY = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}


@pytest.fixture(autouse=True)
def checkpoints(monkeypatch):
    recompute_without_gpu(monkeypatch.setattr)


def chosen_experts(model, batch, step=replaying_step):
    """Return the sorted experts that each router chooses, [tokens, layers, k]."""
    seen = []
    hooks = [
        layer.mlp.router.register_forward_hook(lambda _, args, output: seen.append(output[1]))
        for layer in model.decoder.layers
    ]
    with torch.no_grad():
        step(iter([batch]), model)
    for hook in hooks:
        hook.remove()
    return torch.stack([routing.nonzero()[:, 1].view(-1, 2) for routing in seen], 1)


def train(model, batches, step, passes_at_once=1):
    """Return the losses and gradients of micro-batches; several may wait for their backward."""
    model.zero_grad()
    losses, waiting = [], []
    for batch in batches:
        output, loss_func = step(iter([batch]), model)
        losses.append(loss_func(output)[0])
        waiting.append(losses[-1])
        if len(waiting) == passes_at_once:
            waiting.pop(0).backward()
    for loss in waiting:
        loss.backward()
    gradients = {name: each.grad for name, each in model.named_parameters()}
    return [loss.item() for loss in losses], gradients


def test_the_experts_that_one_model_chose_are_chosen_by_another():
    first = small_model(small_config(**REPLAYED_MOE))
    other = small_model(small_config(**REPLAYED_MOE), seed=1)
    batch = synthetic_batch(0)
    recorded = chosen_experts(first, batch, forward_step)
    assert (chosen_experts(other, batch, forward_step) != recorded).any()
    batch.columns = {"experts": recorded.flip(-1).short()}
    assert torch.equal(chosen_experts(other, batch), recorded)
    # Nothing of it stays.
    assert (chosen_experts(other, batch, forward_step) != recorded).any()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.int64])
def test_experts_may_have_any_type_of_integers(dtype):
    model = small_model(small_config(**REPLAYED_MOE))
    batch = with_experts(synthetic_batch(1), 2)
    experts = batch.columns["experts"]
    experts[experts[..., 0] < 0] = torch.tensor([0, 1], dtype=experts.dtype)
    expected = chosen_experts(model, batch)
    batch.columns["experts"] = experts.to(dtype)
    assert torch.equal(chosen_experts(model, batch), expected)


def test_tokens_without_experts_are_routed_freely():
    model = small_model(small_config(**REPLAYED_MOE))
    batch = with_experts(synthetic_batch(4), 2)
    experts = batch.columns["experts"].sort(-1).values.long()
    has_none = experts[:, 0, 0] < 0
    assert (has_none & ~batch.padding_mask()).any()
    found = chosen_experts(model, batch)
    assert torch.equal(found[~has_none], experts[~has_none])
    # The first layer sees the same in both; later ones see what the given experts computed.
    free = chosen_experts(model, batch, forward_step)
    assert torch.equal(found[has_none, 0], free[has_none, 0])


@pytest.mark.parametrize(
    "recompute", [{}, WHOLE_LAYERS, ONE_LAYER, EXPERTS_ONLY], ids=["no", "all", "block", "experts"]
)
def test_losses_and_gradients_are_those_of_a_router_forced_by_hand(recompute):
    batches = [with_experts(synthetic_batch(seed), 2, seed) for seed in (1, 4, 5)]
    expected, gradients = train(small_model(small_config(**MOE)), batches, forced_step)
    model = small_model(small_config(**REPLAYED_MOE, **recompute))
    # As in a pipeline, a micro-batch waits for its backward pass while the next ones begin.
    losses, found = train(model, batches, replaying_step, passes_at_once=2)
    assert losses == pytest.approx(expected, abs=1e-6)
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)
    assert not any(rank_data().recomputed.values())


def test_experts_of_a_failed_step_do_not_reach_the_next_run():
    model = small_model(small_config(**REPLAYED_MOE, **WHOLE_LAYERS))
    batches = [with_experts(synthetic_batch(seed), 2, seed) for seed in (1, 4)]
    _, expected = train(model, batches[1:], replaying_step)
    expected = {name: each.clone() for name, each in expected.items()}
    replaying_step(iter(batches[:1]), model)  # its backward pass never comes
    create_broadcast_groups()
    _, found = train(model, batches[1:], replaying_step)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient)


@pytest.mark.parametrize("layers", [3, 2], ids=["all layers", "layers with experts"])
def test_dense_layers_are_counted(layers):
    config = small_config(**REPLAYED_MOE, num_layers=3, moe_layer_freq=[1, 0, 1])
    model = small_model(config)
    batch = with_experts(synthetic_batch(0), 2)
    expected = batch.columns["experts"].sort(-1).values.long()
    if layers == 3:
        first, last = batch.columns["experts"].unbind(1)
        batch.columns["experts"] = torch.stack([first, torch.full_like(first, 77), last], 1)
    seen = []
    for number in (0, 2):
        model.decoder.layers[number].mlp.router.register_forward_hook(
            lambda _, args, output: seen.append(output[1].nonzero()[:, 1].view(-1, 2))
        )
    replaying_step(iter([batch]), model)
    for number, found in enumerate(seen):
        has_some = expected[:, number, 0] >= 0
        assert torch.equal(found[has_some], expected[has_some, number])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"moe_enable_routing_replay": False}, "moe_enable_routing_replay=False found; set it to"),
        ({"moe_router_fusion": True}, "moe_router_fusion=True"),
        ({"moe_router_load_balancing_type": "sinkhorn"}, "'sinkhorn'"),
        ({"moe_router_load_balancing_type": "quantile_balancing"}, "'quantile_balancing'"),
        ({"num_moe_experts": None}, "the model has no experts"),
        ({"cuda_graph_impl": "local", "cuda_graph_scope": []}, "cuda_graph_impl='local'"),
    ],
)
def test_a_model_whose_routers_cannot_be_told_is_refused_before_a_batch_is_drawn(change, message):
    model = small_model(small_config(**REPLAYED_MOE))
    for name, value in change.items():
        setattr(model.config, name, value)
    with pytest.raises(ConfigError, match=message):
        replaying_step(iter([]), model)


def test_a_version_without_the_option_is_refused_by_its_name():
    model = small_model(small_config(**REPLAYED_MOE))
    model.config = Without(model.config)
    with pytest.raises(ConfigError, match="megatron-core has no moe_enable_routing_replay; use"):
        replaying_step(iter([]), model)


class Without:
    """A configuration as in megatron-core 0.15."""

    def __init__(self, config):
        self._config = config

    def __getattr__(self, name):
        if name == "moe_enable_routing_replay":
            raise AttributeError(name)
        return getattr(self._config, name)


def test_graphs_of_attention_alone_are_accepted():
    model = small_model(small_config(**REPLAYED_MOE))
    model.config.cuda_graph_impl, model.config.cuda_graph_scope = "transformer_engine", ["attn"]
    check_replayable(model)


def test_a_router_that_does_not_ask_for_its_choice_is_refused():
    model = small_model(small_config(**REPLAYED_MOE))
    router, batch = model.decoder.layers[1].mlp.router, with_experts(synthetic_batch(0), 2)
    router.routing = lambda logits, **_: (torch.full_like(logits[:, 0], 0.25), logits[:, 0] < 1e9)
    with pytest.raises(ConfigError, match="the routers of layers 2 did not ask for their choice"):
        replaying_step(iter([batch]), model)


def spoil(place, value):
    def change(experts):
        experts[place] = torch.tensor(value, dtype=experts.dtype)
        return experts

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda experts: experts[:, :1], r"int16 \['N', 1, 2\] found, integers \['N', 2, 2\]"),
        (lambda experts: experts[..., :1], r"int16 \['N', 2, 1\] found"),
        (lambda experts: experts.float(), r"float32 \['N', 2, 2\] found"),
        (spoil((3, 1), [0, 4]), r"experts \[0, 4\] of token 3, layer 1 found; .* from 0 to 3, or"),
        (spoil((3, 1), [2, 2]), r"experts \[2, 2\] of token 3, layer 1"),
        (spoil((3, 1), [2, -1]), r"experts \[2, -1\] of token 3, layer 1"),
        (spoil((3, 1), [-2, -2]), r"experts \[-2, -2\] of token 3, layer 1"),
    ],
)
def test_experts_that_are_not_those_of_the_model_are_refused(change, message):
    batch = with_experts(synthetic_batch(0), 2)
    batch.columns["experts"] = change(batch.columns["experts"])
    with pytest.raises(ConfigError, match=r"columns\['experts'\]: " + message):
        replaying_step(iter([batch]), small_model(small_config(**REPLAYED_MOE)))


def test_training_needs_the_column_but_an_evaluation_does_not():
    model = small_model(small_config(**REPLAYED_MOE))
    batch = synthetic_batch(0)
    batch.columns = {"score": torch.zeros(batch.num_tokens)}
    with pytest.raises(ConfigError, match="experts='experts': a batch with score was drawn"):
        replaying_step(iter([batch]), model)
    free = chosen_experts(model, batch, functools.partial(forward_step))
    assert torch.equal(chosen_experts(model, batch), free)
