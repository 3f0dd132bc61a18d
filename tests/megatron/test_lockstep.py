# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Generation and GRPO with models split over real processes."""

import dataclasses
import functools
import types

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from energon_ext import ConfigError
from energon_ext.encoders.prompts import Prompt
from energon_ext.errors import SamplerError
from energon_ext.megatron import data_parallel_worker_config, forward_step
from energon_ext.rl import RLDataset
from tests.megatron.example_code import MegatronSampler, Sampling, generate
from tests.megatron.small_gpt import MOE, model_parallel, small_config, small_model
from tests.megatron.small_training import run_ranks, run_schedule, trainable
from tests.rl.prompts import prompt_dataset, write_prompts

#: Prompts by data-parallel rank, different in number and length; further ranks have none.
PROMPTS = [[[5, 6, 7], [9], [11, 12, 13, 14, 15]], [[20, 21, 22, 23, 24, 25, 26, 27]]]
STOP = 3
SAMPLING = Sampling(6, temperature=1.3, stop_id=STOP, vocab_size=20)

TENSORS = {"tensor_model_parallel_size": 2}
STAGES = {"pipeline_model_parallel_size": 2}
EXPERTS = {"expert_model_parallel_size": 2}
SEQUENCE = {"sequence_parallel": True}
RANKS = 4


def answers(prompts, sizes, config, rows_per_pass=None):
    """Answer with a new model under this layout; the weights are the same under all layouts."""
    model = small_model(small_config(**sizes, **config))
    return generate(
        model, prompts, SAMPLING, seeds=range(7, 7 + len(prompts)), rows_per_pass=rows_per_pass
    )


def answers_on_a_rank(sizes, config, rows_per_pass):
    layout = {name: size for name, size in sizes.items() if name != "sequence_parallel"}
    with model_parallel(**layout):
        replica = parallel_state.get_data_parallel_rank()
        prompts = PROMPTS[replica] if replica < len(PROMPTS) else []
        return replica, answers(prompts, sizes, config, rows_per_pass)


#: Name -> (sizes of model parallelism, configuration of the model, rows per pass)
SPLIT = {
    "both": ({**TENSORS, **STAGES, **SEQUENCE}, {}, 2),
    "experts": ({"expert_model_parallel_size": RANKS}, MOE, None),
    "tensors+experts": (
        {**TENSORS, **EXPERTS, **SEQUENCE, "expert_tensor_parallel_size": 1}, MOE, None
    ),
    "stages+experts": ({**STAGES, **EXPERTS}, MOE, 2),
}  # fmt: skip
NIGHTLY_SPLIT = {"tensors": (TENSORS, {}, None), "stages": (STAGES, {}, None)}


def check_answers(results, config, rows_per_pass):
    """Compare with the whole model; each data-parallel rank has its own prompts, or none."""
    expected = [answers(prompts, {}, config, rows_per_pass) for prompts in [*PROMPTS, [], []]]
    lengths = {len(response) for responses, _ in expected for response in responses}
    assert len(lengths) > 1  # some stop early, and others continue
    for replica, (responses, log_probs) in results:
        assert responses == expected[replica][0]
        for found, wanted in zip(log_probs, expected[replica][1]):
            assert found == pytest.approx(wanted, abs=1e-4)
    replicas = {replica for replica, _ in results}
    assert replicas == set(range(len(replicas)))


@pytest.mark.parametrize("layout", SPLIT)
def test_a_split_model_answers_like_the_whole_one(one_rank, ranks, layout):
    check_answers(ranks[layout], *SPLIT[layout][1:])


@pytest.mark.nightly
@pytest.mark.parametrize("layout", NIGHTLY_SPLIT)
def test_a_model_split_in_one_way_answers_like_the_whole_one(one_rank, tmp_path, layout):
    work = functools.partial(answers_on_a_rank, *NIGHTLY_SPLIT[layout])
    check_answers(run_ranks(RANKS, work, tmp_path), *NIGHTLY_SPLIT[layout][1:])


@pytest.mark.parametrize(
    ("context", "experts", "message"),
    [
        (2, 2, "context-parallel size must be 1, got 2"),
        (1, 3, "tensor-parallel size 2 with experts over 3 ranks"),
    ],
)
def test_an_unsupported_layout_is_refused_at_construction(
    one_rank, monkeypatch, context, experts, message
):
    for name, value in {
        "context_parallel_world_size": context,
        "tensor_model_parallel_world_size": 2,
        "expert_tensor_and_model_parallel_group": types.SimpleNamespace(size=lambda: experts),
    }.items():
        monkeypatch.setattr(parallel_state, f"get_{name}", lambda value=value: value)
    with pytest.raises(ConfigError, match=message):
        MegatronSampler(torch.nn.Linear(1, 1), None, group_size=2, sampling=SAMPLING)


def ask_different_prompts():
    with model_parallel(**TENSORS):
        model = small_model(small_config(**TENSORS))
        sampler = MegatronSampler(model, None, group_size=2, sampling=SAMPLING)
        with pytest.raises(SamplerError) as error:
            sampler.sample_and_score_batch(
                [dataclasses.replace(PROMPT, __key__=f"p{dist.get_rank()}")], seeds=[3]
            )
        return str(error.value)


def test_different_prompts_on_the_ranks_of_a_model_are_an_error(ranks):
    for message in ranks["different prompts"]:
        assert "the ranks of a model ask for different prompts" in message


PROMPT = Prompt(
    __key__="p",
    __restore_key__=(),
    __subflavors__=None,
    tokens=np.array([5, 6]),
    source="web",
    metadata={},
)


def sample_with_rewards_by_rank(sizes):
    """Sample with a reward that differs on every rank."""
    with model_parallel(**sizes):
        model = small_model(small_config(**sizes))
        reward = functools.partial(judge, offset=10 * dist.get_rank())
        sampler = MegatronSampler(model, reward, group_size=2, sampling=SAMPLING)
        (group,) = sampler.sample_and_score_batch([PROMPT], seeds=[3])
        first = min(dist.get_process_group_ranks(parallel_state.get_model_parallel_group()))
        return first, group.tokens.tolist(), group.rewards.tolist()


def judge(prompt, responses, offset):
    return [float(offset + n) for n in range(len(responses))]


@pytest.mark.parametrize("split", ["tensors", "stages"])
def test_a_replica_computes_its_rewards_once(ranks, split):
    by_rank = ranks[f"rewards by rank, {split}"]
    for first, tokens, rewards in by_rank:
        assert tokens == by_rank[first][1]
        assert rewards == [10 * first, 10 * first + 1]


def fail_to_score():
    with model_parallel(**TENSORS):
        model = small_model(small_config(**TENSORS))
        sampler = MegatronSampler(model, broken_judge, group_size=2, sampling=SAMPLING)
        with pytest.raises(SamplerError) as error:
            sampler.sample_and_score_batch([PROMPT], seeds=[3])
        return str(error.value)


def broken_judge(prompt, responses):
    raise KeyError("answer")


def test_all_ranks_of_a_replica_report_a_failed_reward(ranks):
    messages = ranks["failed reward"]
    assert messages[0].startswith("Prompt p: the reward raised KeyError: 'answer'")
    assert messages == [messages[0], f"On rank 0: {messages[0]}"] * 2  # numbered in each replica


def policy(path, model, reward, **options):
    """GRPO over short prompts."""
    sampling = Sampling(4, stop_id=STOP, vocab_size=16)
    workers = data_parallel_worker_config(num_workers=0, seed=1)
    loader = prompt_dataset(
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
    sizes = {"expert_model_parallel_size": RANKS}
    with model_parallel(**sizes):
        model = small_model(small_config(**sizes, **MOE), vocabulary=256)
        with pytest.raises(SamplerError) as error:
            next(policy(path, model, reward))
        return str(error.value)


def test_a_reward_that_fails_on_one_rank_ends_the_call_on_all(ranks):
    """Otherwise the others would wait for it in their next forward pass."""
    first, failed, *others = ranks["failed reward of one rank"]
    assert "the reward raised KeyError: 'answer'" in failed
    for message in (first, *others):
        assert "another rank failed; see its error" in message


@pytest.fixture(scope="module")
def byte_prompts(tmp_path_factory):
    """Prompts of one to three bytes."""
    records = [{"prompt": chr(n) * (1 + n % 3)} for n in range(40, 60)]
    return write_prompts(tmp_path_factory.mktemp("bytes") / "prompts.jsonl", records)


def in_turn(tasks):
    return {name: task() for name, task in tasks.items()}


@pytest.fixture(scope="module")
def ranks(byte_prompts, tmp_path_factory):
    """The results of all ranks by task; they start once for all tasks."""
    tasks = {
        "different prompts": ask_different_prompts,
        "rewards by rank, tensors": functools.partial(sample_with_rewards_by_rank, TENSORS),
        "rewards by rank, stages": functools.partial(sample_with_rewards_by_rank, STAGES),
        "failed reward": fail_to_score,
        "failed reward of one rank": functools.partial(fail_on_one_rank, byte_prompts),
        **{name: functools.partial(answers_on_a_rank, *split) for name, split in SPLIT.items()},
    }
    work = functools.partial(in_turn, tasks)
    by_rank = run_ranks(RANKS, work, tmp_path_factory.mktemp("ranks"))
    return {name: [results[name] for results in by_rank] for name in tasks}


def share_of_large_tokens(prompt, responses):
    """1 for an answer of four tokens above 7; random answers get one half or stop early."""
    return [sum(token > 7 for token in each.tokens) / 4 for each in responses]


def reinforce(path, sizes, steps):
    """Return mean rewards and metrics by step on this rank, and the change of the weights."""
    with model_parallel(**sizes):
        config = small_config(**sizes, **MOE, init_method_std=0.05)
        ddp, optimizer = trainable(config, vocabulary=256, lr=3e-3, clip_grad=1.0)
        model = ddp.module
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
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
    assert found[0][0] != found[1][0]  # each has its own prompts and answers
    assert found[0][1] == found[1][1]  # metrics over both
    for one, other, of_both in zip(found[0][0], found[1][0], found[0][1]):
        assert 2 <= of_both["valid_groups"] <= 8
        if of_both["attempts_per_batch"] == 8:  # equally many answers on each
            assert of_both["reward/mean"] == pytest.approx((one + other) / 2)
    assert found[0][3] == pytest.approx(found[1][3], rel=1e-9)  # one model
