# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Four real processes under gloo: mixed layouts, and stages without embedding or loss."""

import functools
import itertools

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func

from energon_ext.compat import default_store
from energon_ext.megatron import forward_step
from tests.megatron.forced_routing import (
    CAN_REPLAY,
    NEEDS_REPLAY,
    REPLAYED_MOE,
    WHOLE_LAYERS,
    batches_with_experts,
    forced_step,
    recompute_without_gpu,
    replaying_step,
    with_experts,
)
from tests.megatron.small_gpt import (
    BALANCED_MOE,
    MOE,
    ROUTERS_TAKE_A_MASK,
    VOCABULARY,
    megatron,
    model_parallel,
    small_config,
    small_model,
    synthetic_batch,
)
from tests.megatron.small_training import (
    STEPS,
    position_losses,
    run_ranks,
    run_schedule,
    synthetic,
    train,
)

TENSOR_PIPELINE = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
EXPERT_PIPELINE = {"expert_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
STAGES = {"pipeline_model_parallel_size": 4}
FOUR_LAYERS = {"num_layers": 4}
SEQUENCE = {"sequence_parallel": True}

#: Name -> (sizes of model parallelism, configuration of the model)
FAST = {
    "dense, 4 stages": (STAGES, FOUR_LAYERS),
    "moe, tensor and sequence parallel in 2 stages": (
        TENSOR_PIPELINE,
        {**MOE, **SEQUENCE, **FOUR_LAYERS},
    ),
}
NIGHTLY = {
    "dense, tensor parallel in 2 stages": (TENSOR_PIPELINE, FOUR_LAYERS),
    "dense, tensor and sequence parallel in 2 stages": (
        TENSOR_PIPELINE,
        {**SEQUENCE, **FOUR_LAYERS},
    ),
    "balanced moe, 4 stages": (STAGES, {**BALANCED_MOE, **FOUR_LAYERS}),
    "balanced moe, expert parallel in 2 stages": (
        EXPERT_PIPELINE,
        {**BALANCED_MOE, **FOUR_LAYERS},
    ),
}


def losses_before_and_after_a_change():
    """Return the losses of a batch through four stages, and with its first token changed."""
    with model_parallel(**STAGES):
        model = small_model(small_config(**STAGES, **FOUR_LAYERS))
        batch = synthetic_batch(3)
        before = position_losses(model, batch)
        batch.tokens[0] = (batch.tokens[0] + 1) % VOCABULARY
        return [before, position_losses(model, batch)]


def masks_of_routers():
    """Return the padding masks that the routers of this rank received."""
    with model_parallel(**TENSOR_PIPELINE):
        config = {**TENSOR_PIPELINE, **MOE, **SEQUENCE, **FOUR_LAYERS}
        model = small_model(small_config(**config))
        seen = []
        for layer in model.decoder.layers:
            layer.mlp.router.register_forward_pre_hook(
                lambda _, args: seen.append(args[1].flatten().tolist())
            )
        with torch.no_grad():
            run_schedule(model, [synthetic_batch(4)], forward_step, forward_only=True)
        return {"rank": parallel_state.get_tensor_model_parallel_rank(), "masks": seen}


def train_with_given_experts():
    """Return the results of steps whose layers are recomputed, and the experts of a batch."""
    recompute_without_gpu()
    config = {**REPLAYED_MOE, **SEQUENCE, **FOUR_LAYERS}
    found = train(
        TENSOR_PIPELINE, {**config, **WHOLE_LAYERS}, STEPS, batches_with_experts, replaying_step
    )
    with model_parallel(**TENSOR_PIPELINE):
        model = small_model(small_config(**TENSOR_PIPELINE, **config))
        seen = {}

        def note(router, inputs, output):
            seen[router.layer_number - 1] = output[1].nonzero()[:, 1].tolist()

        for layer in model.decoder.layers:
            layer.mlp.router.register_forward_hook(note)
        with torch.no_grad():
            batch = with_experts(synthetic_batch(4), 4)
            run_schedule(model, [batch], replaying_step, forward_only=True)
        rank = parallel_state.get_tensor_model_parallel_rank()
        return {"steps": found, "rank": rank, "seen": seen}


class Failure(Exception):
    """A fault of the machine in the middle of a step."""


def restarted():
    """Return what a run draws and loses after another one has failed in the same process."""
    rank, ranks, store = dist.get_rank(), dist.get_world_size(), default_store()
    found = {}
    for number, name in enumerate(("undisturbed", "failing", "restarted")):
        dist.destroy_process_group()
        # Megatron-LM's restart in process gives each run a part of the store of its own.
        options = {"store": dist.PrefixStore(str(number), store), "rank": rank}
        dist.init_process_group("gloo", world_size=ranks, **options)
        found[name] = interleaved_step(0 if name == "failing" else 1, fails=name == "failing")
    return found


def interleaved_step(step, fails):
    """Return the tokens that each virtual stage of this rank takes in a step, and the losses."""
    sizes = {**TENSOR_PIPELINE, "virtual_pipeline_model_parallel_size": 2}
    taken = [[], []]
    with model_parallel(**sizes):
        config = small_config(**sizes, **FOUR_LAYERS)
        models = [small_model(config, vp_stage=stage) for stage in (0, 1)]
        # The first stage has sent its first micro-batch and drawn the second one.
        last = 1 if parallel_state.is_pipeline_last_stage() else 2

        def note(model, inputs):
            taken[model.vp_stage].append(inputs[0].flatten().tolist())
            if fails and len(taken[0]) == last:
                raise Failure

        for model in models:
            model.register_forward_pre_hook(note)
        batches = synthetic(step, 0, 1)
        loads = parallel_state.get_tensor_model_parallel_rank() == 0
        iterators = itertools.tee(iter(batches), 2) if loads else [None, None]
        try:
            reports = get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=list(iterators),
                model=models,
                num_microbatches=len(batches),
                seq_length=batches[0].num_tokens,
                micro_batch_size=1,
                forward_only=True,
            )
        except Failure:
            return "failed"
        return {"taken": taken, "losses": [report["lm loss"].tolist() for report in reports]}


def fast_layouts():
    results = {name: train(*layout, STEPS) for name, layout in FAST.items()}
    results["change"] = losses_before_and_after_a_change()
    if ROUTERS_TAKE_A_MASK:
        results["masks"] = masks_of_routers()
    if CAN_REPLAY:
        results["given experts"] = train_with_given_experts()
    results["restart"] = restarted()
    return results


def nightly_layouts():
    return {name: train(*layout, STEPS) for name, layout in NIGHTLY.items()}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_ranks(4, fast_layouts, tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def nightly_ranks(tmp_path_factory):
    return run_ranks(4, nightly_layouts, tmp_path_factory.mktemp("ranks"))


@functools.cache
def alone(kind):
    """Return the results of one rank with a kind of model."""
    config = {"dense": {}, "moe": MOE, "balanced moe": BALANCED_MOE}[kind]
    with megatron():
        parallel_state.destroy_model_parallel()
        return train({}, {**config, **FOUR_LAYERS}, STEPS)


def check_layout(layout, ranks):
    expected = alone(layout.partition(",")[0])
    tolerance = 1e-4 if layout.startswith("moe") else 1e-5
    for step in range(STEPS):
        found = [rank[layout][step] for rank in ranks]
        with_loss = [result for result in found if "loss" in result]
        assert len(with_loss) == (1 if "4 stages" in layout else 2)
        for result in with_loss:
            assert result["loss"] == pytest.approx(expected[step]["loss"], abs=tolerance)
        for result in found:
            assert result["gradient_norm"] == pytest.approx(
                expected[step]["gradient_norm"], rel=tolerance
            )


@pytest.mark.parametrize("layout", FAST)
def test_four_ranks_train_like_one(layout, ranks):
    check_layout(layout, ranks)


@pytest.mark.nightly
@pytest.mark.parametrize("layout", NIGHTLY)
def test_more_layouts_of_four_ranks_train_like_one(layout, nightly_ranks):
    check_layout(layout, nightly_ranks)


@NEEDS_REPLAY
def test_four_ranks_with_given_experts_train_like_a_router_forced_by_hand(ranks):
    with megatron():
        parallel_state.destroy_model_parallel()
        expected = train({}, {**MOE, **FOUR_LAYERS}, STEPS, batches_with_experts, forced_step)
    for rank in ranks:
        for step, found in enumerate(rank["given experts"]["steps"]):
            for name, value in found.items():
                assert value == pytest.approx(expected[step][name], rel=1e-4)
    assert ["loss" in rank["given experts"]["steps"][0] for rank in ranks].count(True) == 2


@NEEDS_REPLAY
def test_each_rank_and_stage_gives_its_tokens_to_the_experts_of_its_layers(ranks):
    experts = with_experts(synthetic_batch(4), 4).columns["experts"].sort(-1).values.long()
    layers_seen = []
    for rank in ranks:
        found = rank["given experts"]
        here = experts.chunk(2)[found["rank"]]
        for layer, chosen in found["seen"].items():
            expected = here[:, int(layer)]
            has_some = expected[:, 0] >= 0
            assert has_some.any()
            assert torch.tensor(chosen).view(-1, 2)[has_some].equal(expected[has_some])
            layers_seen.append(int(layer))
    assert sorted(layers_seen) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_no_stage_attends_across_segments(ranks):
    end = int(synthetic_batch(3).cu_seqlens[1])
    assert [rank["change"] for rank in ranks[:3]] == [[None, None]] * 3
    before, after = ranks[3]["change"]
    assert before[end:] == after[end:]
    # The change does reach every position of its own document.
    assert all(one != other for one, other in zip(before[:end], after))


@pytest.mark.skipif(not ROUTERS_TAKE_A_MASK, reason="routers of megatron-core 0.15 take no mask")
def test_routers_of_every_stage_know_their_padding_under_sequence_parallelism(ranks):
    halves = synthetic_batch(4).padding_mask().view(2, -1).tolist()
    assert halves[0] != halves[1]
    for rank in ranks:
        found = rank["masks"]
        assert found["masks"] == [halves[found["rank"]]] * 2  # two layers on each stage


def test_a_run_that_starts_again_in_its_processes_takes_no_batch_of_the_failed_one(ranks):
    expected = [batch.tokens.tolist() for batch in synthetic(1, 0, 1)]
    for rank in ranks:
        found = rank["restart"]
        assert found["failing"] == "failed"
        assert found["restarted"] == found["undisturbed"]
        assert found["restarted"]["taken"] == [expected, expected]
    assert [len(rank["restart"]["restarted"]["losses"]) for rank in ranks] == [0, 0, 4, 4]
