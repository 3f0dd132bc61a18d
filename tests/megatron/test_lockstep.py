# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Generation and GRPO with models that are split over real processes."""

import dataclasses
import functools

import numpy as np
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

from energon_ext import ConfigError
from energon_ext.encoders.prompts import Prompt
from energon_ext.errors import SamplerError
from energon_ext.megatron import data_parallel_worker_config, forward_step
from energon_ext.rl import RLDataset
from tests.megatron.example_code import MegatronSampler, Sampling, generate
from tests.megatron.small_gpt import MOE, model_parallel, small_config, small_model
from tests.megatron.small_training import run_ranks, run_schedule
from tests.rl.prompts import prompt_loader, write_prompts

#: What the ranks of a data-parallel rank ask: other numbers, other lengths; the last asks nothing.
PROMPTS = [[[5, 6, 7], [9], [11, 12, 13, 14, 15]], [[20, 21, 22, 23, 24, 25, 26, 27]]]
STOP = 3
SAMPLING = Sampling(6, temperature=1.3, stop_id=STOP, vocab_size=20)

TENSORS = {"tensor_model_parallel_size": 2}
STAGES = {"pipeline_model_parallel_size": 2}
EXPERTS = {"expert_model_parallel_size": 2}
SEQUENCE = {"sequence_parallel": True}


def answers(prompts, sizes, config, rows_per_pass=None):
    """Of a new model under this layout; the weights are the same under all."""
    model = small_model(small_config(**sizes, **config))
    return generate(model, prompts, SAMPLING, seed=7, rows_per_pass=rows_per_pass)


def answers_on_a_rank(sizes, config, rows_per_pass):
    layout = {name: size for name, size in sizes.items() if name != "sequence_parallel"}
    with model_parallel(**layout):
        own = parallel_state.get_data_parallel_rank()
        prompts = PROMPTS[own] if own < len(PROMPTS) else []
        return own, answers(prompts, sizes, config, rows_per_pass)


#: Ranks, sizes of model parallelism, configuration of the model, rows of a pass.
SPLIT = {
    "tensors": (2, TENSORS, {}, None),
    "stages": (2, STAGES, {}, None),
    "both": (4, {**TENSORS, **STAGES, **SEQUENCE}, {}, 2),
    "experts": (3, {"expert_model_parallel_size": 3}, {**MOE, "num_moe_experts": 3}, None),
    "tensors+experts": (
        4, {**TENSORS, **EXPERTS, **SEQUENCE, "expert_tensor_parallel_size": 1}, MOE, None
    ),
    "stages+experts": (4, {**STAGES, **EXPERTS}, MOE, 2),
}  # fmt: skip


@pytest.mark.parametrize(
    "layout",
    [*SPLIT][2:] + [pytest.param(each, marks=pytest.mark.nightly) for each in [*SPLIT][:2]],
)
def test_a_split_model_answers_like_the_whole_one(one_rank, ranks, layout):
    """Each data-parallel rank its own prompts, of other lengths and numbers, or none at all."""
    _, _, config, rows_per_pass = SPLIT[layout]
    found = ranks[layout]
    replicas = {own for own, _ in found}
    expected = [answers(prompts, {}, config, rows_per_pass) for prompts in [*PROMPTS, []]]
    lengths = {len(response) for responses, _ in expected for response in responses}
    assert len(lengths) > 1  # some stop early, and others go on
    for own, (responses, log_probs) in found:
        assert responses == expected[own][0]
        for seen, wanted in zip(log_probs, expected[own][1]):
            assert seen == pytest.approx(wanted, abs=1e-4)
    assert replicas == set(range(len(replicas)))


REFUSED = {
    "context": (
        2, {"context_parallel_size": 2}, "context-parallel size must be 1, got 2"
    ),
    "experts of other ranks": (
        6,
        {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 3,
         "expert_tensor_parallel_size": 1},
        "tensor-parallel size 2 with experts over 3 ranks",
    ),
}  # fmt: skip


def refusal(sizes):
    with model_parallel(**sizes), pytest.raises(ConfigError) as error:
        MegatronSampler(torch.nn.Linear(1, 1), None, group_size=2, sampling=SAMPLING)
    return str(error.value)


@pytest.mark.parametrize("layout", REFUSED)
def test_an_unsupported_layout_is_refused_at_construction(ranks, layout):
    world_size, _, message = REFUSED[layout]
    said = ranks[layout]
    assert len(said) == world_size
    assert all(message in each for each in said)


def ask_different_prompts():
    with model_parallel(**TENSORS):
        model = small_model(small_config(**TENSORS))
        sampler = MegatronSampler(model, None, group_size=2, sampling=SAMPLING)
        with pytest.raises(SamplerError) as error:
            sampler.sample_and_score_batch(
                [dataclasses.replace(PROMPT, __key__=f"p{dist.get_rank()}")], seed=3
            )
        return str(error.value)


def test_different_prompts_on_the_ranks_of_a_model_are_an_error(ranks):
    said = ranks["different prompts"]
    assert len(said) == 2
    assert all("the ranks of a model ask for different prompts" in each for each in said)


PROMPT = Prompt(
    __key__="p",
    __restore_key__=(),
    __subflavors__=None,
    tokens=np.array([5, 6]),
    source="web",
    metadata={},
)


def sample_with_unlike_rewards(sizes):
    """A judge that never says the same twice."""
    with model_parallel(**sizes):
        model = small_model(small_config(**sizes))
        reward = functools.partial(judge, offset=10 * dist.get_rank())
        sampler = MegatronSampler(model, reward, group_size=2, sampling=SAMPLING)
        (group,) = sampler.sample_and_score_batch([PROMPT], seed=3)
        return group.tokens.tolist(), group.rewards.tolist()


def judge(prompt, responses, offset):
    return [float(offset + n) for n in range(len(responses))]


@pytest.mark.parametrize("split", ["tensors", "stages"])
def test_a_replica_computes_its_rewards_once(ranks, split):
    one, other = ranks[f"unlike rewards, {split}"]
    assert one == other
    assert one[1] == [0, 1]


def fail_to_score():
    with model_parallel(**TENSORS):
        model = small_model(small_config(**TENSORS))
        sampler = MegatronSampler(model, broken_judge, group_size=2, sampling=SAMPLING)
        with pytest.raises(SamplerError) as error:
            sampler.sample_and_score_batch([PROMPT], seed=3)
        return str(error.value)


def broken_judge(prompt, responses):
    raise KeyError("answer")


def test_all_ranks_of_a_replica_report_a_failed_reward(ranks):
    one, other = ranks["failed reward"]
    assert one.startswith("Prompt p: the reward raised KeyError: 'answer'")
    assert other == f"On rank 0: {one}"


def policy(path, model, reward, **options):
    """GRPO over prompts of one token: 1 16 is "bos 0x0d" in bytes."""
    sampling = Sampling(4, stop_id=STOP, vocab_size=16)
    workers = data_parallel_worker_config(num_workers=0, seed=1)
    loader = prompt_loader(
        path, prompts_per_call=4, rank=workers.rank, world_size=workers.world_size
    )
    sampler = MegatronSampler(model, reward, group_size=8, sampling=sampling)
    return RLDataset(loader, sampler, seq_len=48, rows=4, groups_per_batch=4, **options)


def fail_on_one_rank(path):
    def reward(prompt, responses):
        if dist.get_rank() == 1 and len(asked) >= 2:
            raise KeyError("answer")
        asked.append(prompt)
        return [float(n) for n in range(len(responses))]

    asked = []
    with model_parallel(**EXPERTS):
        model = small_model(small_config(**EXPERTS, **MOE), vocabulary=256)
        with pytest.raises(SamplerError) as error:
            next(policy(path, model, reward))
        return str(error.value)


def test_a_reward_that_fails_on_one_rank_ends_the_call_on_all(ranks):
    """The others would wait for it in their next forward pass."""
    other, failed = ranks["failed reward of one rank"]
    assert "the reward raised KeyError: 'answer'" in failed
    assert "another rank failed to sample; see its error" in other


@pytest.fixture(scope="module")
def byte_prompts(tmp_path_factory):
    """One prompt of one byte for each number from 0 to 9, and longer ones."""
    records = [{"prompt": chr(n) * (1 + n % 3)} for n in range(40, 60)]
    return write_prompts(tmp_path_factory.mktemp("bytes") / "prompts.jsonl", records)


def in_turn(tasks):
    return {name: task() for name, task in tasks.items()}


@pytest.fixture(scope="module")
def ranks(byte_prompts, tmp_path_factory):
    """What every rank found, by what was asked; as many ranks start once for all of it."""
    tasks = {
        2: {
            "different prompts": ask_different_prompts,
            "unlike rewards, tensors": functools.partial(sample_with_unlike_rewards, TENSORS),
            "unlike rewards, stages": functools.partial(sample_with_unlike_rewards, STAGES),
            "failed reward": fail_to_score,
            "failed reward of one rank": functools.partial(fail_on_one_rank, byte_prompts),
        }
    }
    for name, (world_size, sizes, config, rows) in SPLIT.items():
        task = functools.partial(answers_on_a_rank, sizes, config, rows)
        tasks.setdefault(world_size, {})[name] = task
    for name, (world_size, sizes, _) in REFUSED.items():
        tasks.setdefault(world_size, {})[name] = functools.partial(refusal, sizes)
    found = {}
    for world_size, of_these in tasks.items():
        folder = tmp_path_factory.mktemp(f"ranks{world_size}")
        by_rank = run_ranks(world_size, functools.partial(in_turn, of_these), folder)
        found.update({name: [one[name] for one in by_rank] for name in of_these})
    return found


def share_of_large_tokens(prompt, responses):
    """1 for an answer of four tokens above 7; random ones have one half, and stop early."""
    return [sum(token > 7 for token in response) / 4 for response in responses]


def reinforce(path, sizes, steps):
    """Mean rewards of each step on this rank, and what became of the weights."""
    with model_parallel(**sizes):
        config = small_config(**sizes, **MOE, init_method_std=0.05)
        model = small_model(config, vocabulary=256)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        ddp = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
        optimizer = get_megatron_optimizer(OptimizerConfig(lr=3e-3, clip_grad=1.0), [ddp])
        config.finalize_model_grads_func = finalize_model_grads
        dataset = policy(path, ddp, share_of_large_tokens)
        rewards, of_all = [], []
        for _ in range(steps):
            ddp.zero_grad_buffer()
            optimizer.zero_grad()
            batch = next(dataset)
            run_schedule(ddp, [batch], functools.partial(forward_step, weight_scale=1024))
            optimizer.step()
            rewards.append(dataset.metrics["reward/mean"])
            of_all.append(dataset.metrics_of_all_ranks())
        now = dict(model.named_parameters())
        moved = {name: float((now[name] - old).abs().max()) for name, old in before.items()}
        dense = {n: float(p.double().sum()) for n, p in now.items() if "experts" not in n}
        return rewards, of_all, moved, dense


@pytest.mark.nightly
def test_grpo_trains_a_mixture_of_experts_split_over_two_ranks(byte_prompts, tmp_path):
    found = run_ranks(2, functools.partial(reinforce, byte_prompts, EXPERTS, 25), tmp_path)
    for rewards, _, moved, _ in found:
        assert sum(rewards[:2]) / 2 < 0.55
        assert sum(rewards[-3:]) / 3 > 0.8
        assert min(moved.values()) > 1e-3  # dense parts, router and experts
        assert sum("experts" in name for name in moved) > 3
    assert found[0][0] != found[1][0]  # each its own prompts and answers
    assert found[0][1] == found[1][1]  # metrics of both
    for one, other, of_both in zip(found[0][0], found[1][0], found[0][1]):
        assert 2 <= of_both["valid_groups"] <= 8
        if of_both["attempts_per_batch"] == 8:  # as many answers on each
            assert of_both["reward/mean"] == pytest.approx((one + other) / 2)
    assert found[0][3] == pytest.approx(found[1][3], rel=1e-9)  # one model
