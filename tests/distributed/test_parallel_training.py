# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Two real processes under gloo: tensor, pipeline and data parallel train like one rank.

The processes are started once and go through all layouts; the tests look at what they found.
"""

import hashlib
import json
import math

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func

from energon_ext import SampleError
from energon_ext.megatron import forward_step, get_batch, mean_losses, summarize_step
from tests.megatron import processes
from tests.megatron.small_gpt import (
    MOE,
    megatron,
    model_parallel,
    small_config,
    small_model,
    synthetic_batch,
)

STEPS = 3
MICRO_BATCHES = 4

TENSOR = {"tensor_model_parallel_size": 2}
PIPELINE = {"pipeline_model_parallel_size": 2}
MOE_LAYERS = {**MOE, "num_layers": 2}

#: Name -> (sizes of model parallelism, configuration of the model)
LAYOUTS = {
    "tensor parallel": (TENSOR, {}),
    "tensor and sequence parallel": (TENSOR, {"sequence_parallel": True}),
    "pipeline parallel": (PIPELINE, {}),
    "data parallel": ({}, {}),
    "moe, pipeline parallel": (PIPELINE, MOE_LAYERS),
    "moe, expert parallel": ({"expert_model_parallel_size": 2}, MOE_LAYERS),
}


def train(sizes, config):
    """Losses and gradient norms of a few steps; None where this rank sees no loss."""
    with model_parallel(**sizes):
        model = small_model(small_config(**sizes, **config))
        ddp_config = DistributedDataParallelConfig()
        model = DistributedDataParallel(model.config, ddp_config, model)
        # Plain descent: Adam's first steps do not depend on the size of the gradient.
        options = OptimizerConfig(optimizer="sgd", lr=0.5, sgd_momentum=0.0, clip_grad=1.0)
        optimizer = get_megatron_optimizer(options, [model])
        model.config.finalize_model_grads_func = finalize_model_grads
        return [train_step(model, optimizer, step) for step in range(STEPS)]


def train_step(model, optimizer, step):
    replicas = parallel_state.get_data_parallel_world_size()
    replica = parallel_state.get_data_parallel_rank()
    # Micro-batches have other sizes of loss and count, so means of means would differ.
    seeds = range(step * MICRO_BATCHES + replica, (step + 1) * MICRO_BATCHES, replicas)
    loads = parallel_state.get_tensor_model_parallel_rank() == 0
    model.zero_grad_buffer()
    optimizer.zero_grad()
    reports = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=(synthetic_batch(seed) for seed in seeds) if loads else None,
        model=[model],
        num_microbatches=len(seeds),
        seq_length=synthetic_batch(0).num_tokens,
        micro_batch_size=1,
        forward_only=False,
    )
    _, gradient_norm, _ = optimizer.step()
    return {**mean_losses(reports), "gradient_norm": gradient_norm}


def received_batch():
    """Hash of the batch, with every optional field, that get_batch gives this rank."""
    with model_parallel(**TENSOR):
        batch = synthetic_batch(0)
        batch.log_probs = torch.linspace(-1, 0, batch.num_tokens)
        batch.rewards = torch.arange(len(batch.source_ids)).float()
        loads = parallel_state.get_tensor_model_parallel_rank() == 0
        found = get_batch(iter([batch]) if loads else None).validate()
        plain = get_batch(iter([synthetic_batch(1)]) if loads else None)
        assert plain.log_probs is None
        assert plain.rewards is None
        return [field_hash(found), field_hash(plain)]


def field_hash(batch):
    digest = hashlib.sha256()
    for name, value in sorted(vars(batch).items()):
        if name == "buffer":
            continue  # the same bytes again
        if isinstance(value, torch.Tensor):
            value = (value.dtype, value.tolist())
        digest.update(repr((name, value)).encode())
    return digest.hexdigest()


def failed_draw():
    """What each rank hears when tensor-parallel rank 0 cannot draw."""
    with model_parallel(**TENSOR):
        try:
            get_batch(broken_iterator())
        except (SampleError, ZeroDivisionError) as error:
            return f"{type(error).__name__}: {error}"


def broken_iterator():
    yield 1 / 0


def global_summary():
    with model_parallel():
        rank = dist.get_rank()
        return summarize_step([synthetic_batch(2 * rank), synthetic_batch(2 * rank + 1)])


def two_ranks(rank, folder):
    store = dist.FileStore(str(folder / "store"), 2)
    with megatron(rank, 2, store):
        parallel_state.destroy_model_parallel()
        results = {name: train(*layout) for name, layout in LAYOUTS.items()}
        results["received batch"] = received_batch()
        results["failed draw"] = failed_draw()
        results["summary"] = global_summary()
        parallel_state.initialize_model_parallel()
    (folder / f"rank{rank}.json").write_text(json.dumps(results))


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What both ranks found: [rank][name]."""
    folder = tmp_path_factory.mktemp("ranks")
    errors = [folder / f"stderr{rank}" for rank in range(2)]
    started = [processes.start(two_ranks, (rank, folder), errors[rank]) for rank in range(2)]
    codes = processes.finish(started)
    assert codes == [0, 0], "\n".join(error.read_text()[-3000:] for error in errors)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def one_rank_results():
    with megatron():
        parallel_state.destroy_model_parallel()
        return {
            "dense": train({}, {}),
            "moe": train({}, MOE_LAYERS),
        }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_train_like_one(layout, ranks, one_rank_results):
    expected = one_rank_results["moe" if layout.startswith("moe") else "dense"]
    assert expected[-1]["loss"] < expected[0]["loss"] - 0.1
    tolerance = 1e-5
    for step in range(STEPS):
        found = [rank[layout][step] for rank in ranks]
        with_loss = [result for result in found if "loss" in result]
        assert len(with_loss) == (1 if "pipeline" in layout else 2)
        for result in with_loss:
            assert result["loss"] == pytest.approx(expected[step]["loss"], abs=tolerance)
            assert result["loss_by_source"] == pytest.approx(
                expected[step]["loss_by_source"], abs=tolerance
            )
        for result in found:
            assert result["gradient_norm"] == pytest.approx(
                expected[step]["gradient_norm"], rel=1e-4
            )
            assert math.isfinite(result["gradient_norm"])


def test_every_rank_receives_the_batch_that_one_drew(ranks):
    full = synthetic_batch(0)
    full.log_probs = torch.linspace(-1, 0, full.num_tokens)
    full.rewards = torch.arange(len(full.source_ids)).float()
    expected = [field_hash(full), field_hash(synthetic_batch(1))]
    assert [rank["received batch"] for rank in ranks] == [expected, expected]


def test_a_failed_draw_reaches_every_rank_and_none_hangs(ranks):
    assert ranks[0]["failed draw"] == "ZeroDivisionError: division by zero"
    assert ranks[1]["failed draw"].startswith("SampleError: Rank 0 failed to draw a batch")


def test_a_summary_covers_the_batches_of_all_ranks(ranks):
    assert ranks[0]["summary"] == ranks[1]["summary"]
    batches = [synthetic_batch(seed) for seed in range(4)]
    for source in ("code", "web"):
        expected = sum(batch.tokens_per_source().get(source, 0) for batch in batches)
        assert ranks[0]["summary"]["tokens"][source] == expected
