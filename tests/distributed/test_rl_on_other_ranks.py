# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Reinforcement learning continues on another number of data-parallel ranks."""

import dataclasses
import functools
import threading
from collections import Counter

import pytest
import torch.distributed as dist
from megatron.energon import WorkerConfig

from energon_ext import PromptTaskEncoder, StateMismatchError, get_train_dataset
from energon_ext.errors import SamplerError, StateFormatError
from energon_ext.keyed import stable_hash
from energon_ext.rl import RLDataset
from energon_ext.tokenizers.tokenizers import ByteTokenizer
from tests.megatron.small_training import run_ranks
from tests.rl.prompts import Dice, prompt_dataset, prompt_loader, write_sums
from tests.support import batch_hash, take

SEED = 5
PROMPTS_PER_CALL = 2
#: Ranks and batches of each part of the run; a step has eight groups whatever the ranks.
CHAIN = [(2, 3), (1, 2), (4, 3)]
GROUPS_PER_STEP = 8


class Recorded(Dice):
    """Dice that keep what they were asked and answered."""

    def __init__(self):
        super().__init__()
        self.log = []

    def sample_and_score_batch(self, prompts, seeds):
        groups = super().sample_and_score_batch(prompts, seeds)
        for prompt, seed, group in zip(prompts, seeds, groups):
            name = f"{prompt.source}:{prompt.__key__}"
            self.log.append([name, seed, group.tokens.tolist(), group.rewards.tolist()])
        return groups


def dataset_on(path, sampler, group, rank, ranks, **options):
    workers = WorkerConfig(rank=rank, world_size=ranks, num_workers=0, data_parallel_group=group)
    prompts = get_train_dataset(
        path,
        worker_config=workers,
        batch_size=PROMPTS_PER_CALL,
        task_encoder=PromptTaskEncoder(ByteTokenizer(add_eos=False)),
    )
    groups = GROUPS_PER_STEP // ranks
    sizes = {"seq_len": 40, "rows": 2 * groups, "groups_per_batch": groups}
    return RLDataset(prompts, sampler, seed=SEED, **{**sizes, **options})


def run_chain(path, options):
    """Run the parts of the chain one after the other, each on the first ranks of this world."""
    rank, states, parts = dist.get_rank(), None, []
    groups = {ranks: dist.new_group(list(range(ranks))) for ranks, _ in CHAIN}
    for ranks, batches in CHAIN:
        part, state = {}, None
        if rank < ranks:
            sampler = Recorded()
            dataset = dataset_on(path, sampler, groups[ranks], rank, ranks, **options)
            if states is not None:
                dataset.restore_state(states[::-1])
            trained = []
            for _ in range(batches):
                batch = next(dataset).validate()
                ends = batch.cu_seqlens.tolist()
                spans = zip(ends, ends[1:], batch.source_ids.tolist())
                trained += [batch.tokens[a:b].tolist() for a, b, source in spans if source >= 0]
            state = dataset.save_state()
            part = {"asked": sampler.log, "trained": trained, "counts": dataset.counts}
            answered = [each.group.rewards.tolist() for each in dataset._state().answered]
            part["answered"] = len(answered)
            part["waiting"] = len(state["groups"]) + sum(len({*each}) > 1 for each in answered)
        parts.append(part)
        states = [None] * dist.get_world_size()
        dist.all_gather_object(states, state)
        states = [each for each in states if each is not None]
    failure, waiting, advantages = fail_on_one_rank(path, groups[2]), None, None
    if rank < 2:
        advantages = fail_in_advantages_on_one_rank(path, groups[2])
        waiting = resume_while_one_rank_waits(path, groups[2])
    return {"parts": parts, "failure": failure, "waiting": waiting, "advantages": advantages}


def fail_on_one_rank(path, group):
    """Let the first call of the second rank fail; return its message, and that all go on."""
    rank = dist.get_rank()
    if rank > 1:
        return None

    class FailsOnce(Recorded):
        fails = rank == 1

        def sample_and_score_batch(self, prompts, seeds):
            if self.fails:
                self.fails = False
                raise OSError("server gone")
            return super().sample_and_score_batch(prompts, seeds)

    whole, failing = Recorded(), FailsOnce()
    expected = batch_hash(next(dataset_on(path, whole, group, rank, 2)))
    dataset = dataset_on(path, failing, group, rank, 2)
    with pytest.raises(SamplerError) as error:
        next(dataset)
    same = batch_hash(next(dataset)) == expected
    return [str(error.value), same, sorted(failing.log) == sorted(whole.log)]


def fail_in_advantages_on_one_rank(path, group):
    """Let a function of advantages fail on the second rank; return what the ranks raise."""
    rank = dist.get_rank()

    def advantages(groups):
        if rank == 1:
            raise KeyError("no such group")
        return groups

    dataset = dataset_on(path, Recorded(), group, rank, 2, advantages=advantages)
    try:
        next(dataset)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


class Held(Recorded):
    """Answers only if it may."""

    def __init__(self):
        super().__init__()
        self.may_answer = threading.Event()
        self.may_answer.set()

    def sample_and_score_batch(self, prompts, seeds):
        assert self.may_answer.wait(60)
        return super().sample_and_score_batch(prompts, seeds)


def resume_while_one_rank_waits(path, group):
    """Save inside a version when only the first rank has its answers; return how ranks go on."""
    rank, sampler, options = dist.get_rank(), Held(), {"ahead": 2, "exact": False}
    dataset = dataset_on(path, sampler, group, rank, 2, **options)
    for _ in range(6):
        next(dataset)
    if rank == 1:
        sampler.may_answer.clear()
    next(dataset)  # the first step of a version, which asks for the next one
    if rank == 0:
        dataset._answers._wait()
    asked_in = dataset._state().asked_in
    saved = all_states(dataset, group)
    sampler.may_answer.set()
    resumed = dataset_on(path, Recorded(), group, rank, 2, **options)
    resumed.restore_state(saved)
    for _ in range(7):
        next(resumed).validate()
    # Refuses states of ranks that do not have the same place in the prompts.
    dataset_on(path, Recorded(), group, rank, 2, **options).restore_state(
        all_states(resumed, group)
    )
    return asked_in, resumed.step


def all_states(dataset, group):
    states = [None] * dist.get_world_size(group)
    dist.all_gather_object(states, dataset.save_state(), group=group)
    return states


@pytest.fixture(scope="module")
def sums(tmp_path_factory):
    return write_sums(tmp_path_factory.mktemp("prompts"))


#: How answers are asked for; the ranks also change inside a version.
ASKED = {"in rounds": {}, "ahead": {"ahead": 2}, "for two steps": {"steps_per_version": 2}}


@pytest.fixture(scope="module", params=ASKED.values(), ids=ASKED)
def found(sums, tmp_path_factory, request):
    work = functools.partial(run_chain, sums, request.param)
    return run_ranks(4, work, tmp_path_factory.mktemp("chain"))


def asked_in_all(found):
    return [each for rank in found for part in rank["parts"] for each in part.get("asked", [])]


def test_each_prompt_is_asked_once_an_epoch_with_the_answers_of_one_rank(sums, found):
    """The prompts in the order in which one rank reads them, answered one at a time."""
    asked = asked_in_all(found)
    in_order = [p for call in take(prompt_loader(sums), 200) for p in call][: len(asked)]
    expected = []
    for number, prompt in enumerate(in_order):
        one = Recorded()
        one.sample_and_score_batch([prompt], [stable_hash(f"{SEED}/{number}")])
        expected += one.log
    assert sorted(asked) == sorted(expected)
    times = Counter(name for name, *_ in asked)
    for source, count in (("easy.jsonl", 12), ("hard.jsonl", 7)):
        found_times = [times[f"{source}:{n}"] for n in range(count)]
        assert max(found_times) - min(found_times) <= 1 < max(found_times), source


def test_every_answer_that_teaches_is_trained_on_once_or_waits(found):
    groups = sum(len(set(rewards)) > 1 for *_, rewards in asked_in_all(found))
    trained = sum(len(part.get("trained", [])) for rank in found for part in rank["parts"])
    waiting = sum(rank["parts"][-1]["waiting"] for rank in found)
    assert trained == 3 * GROUPS_PER_STEP * sum(batches for _, batches in CHAIN)
    assert groups == trained // 3 + waiting


def test_waiting_groups_are_shared_by_the_new_ranks(found):
    """Each rank asks for as little as it needs, so the counts show that none was lost."""
    last = [rank["parts"][-1]["counts"] for rank in found]
    asked = asked_in_all(found)
    answered = sum(rank["parts"][-1]["answered"] for rank in found)
    assert sum(counts["groups"] for counts in last) + answered == len(asked)
    assert [counts["batches"] for counts in last] == [8] * 4


def test_a_rank_that_fails_ends_the_call_on_all_and_nothing_is_lost(found):
    first, second = (rank["failure"] for rank in found[:2])
    assert "another rank failed; see its error" in first[0]
    assert "the sampler raised OSError: server gone" in second[0]
    assert first[1:] == second[1:] == [True, True]


def test_an_error_in_a_function_of_advantages_is_raised_on_all_ranks(found):
    first, second = (rank["advantages"] for rank in found[:2])
    assert first == "SamplerError: another rank failed; see its error."
    assert "no such group" in second


def test_ranks_that_were_saved_while_one_waited_go_on_together(found):
    waiting = [rank["waiting"] for rank in found[:2]]
    assert [asked_in for asked_in, _ in waiting] == [3, None]
    assert [step for _, step in waiting] == [14, 14]


def test_states_of_other_ranks_or_of_several_saves_are_refused(sums, tmp_path):
    def fresh(**options):
        sizes = {"seq_len": 40, "rows": 4, "groups_per_batch": 2, "batches_per_step": 2}
        return RLDataset(prompt_dataset(sums), Dice(), **{**sizes, **options})

    dataset = fresh()
    first = dataset._state()
    next(dataset)
    inside = dataset._state()
    next(dataset)
    between = dataset._state()

    def as_rank(state, rank, ranks):
        return dataclasses.replace(state, rank=rank, ranks=ranks).to_json()

    with pytest.raises(StateMismatchError, match="rank: saved '1 of 2', now '0 of 1'.*in a list"):
        fresh().restore_state(as_rank(first, 1, 2))
    for given, message in [
        ([], "No data state was given"),
        ([as_rank(first, 1, 2)], r"states of ranks \[1\] were given, needed are those of all 2"),
        ([as_rank(first, 0, 2)] * 2, r"states of ranks \[0, 0\] were given"),
        ([as_rank(first, 0, 2), as_rank(between, 1, 2)], "ranks 0 and 1 differ in prompts"),
    ]:
        with pytest.raises(StateFormatError, match=message):
            fresh().restore_state(given)
    with pytest.raises(StateMismatchError, match="ranks: saved 2, now 1.*saved inside a st"):
        fresh().restore_state([as_rank(inside, rank, 2) for rank in range(2)])
    with pytest.raises(StateMismatchError, match="batches_per_step: saved 2, now 1"):
        fresh(batches_per_step=1).restore_state(inside.to_json())
    resumed = fresh(batches_per_step=1, groups_per_batch=3)
    resumed.restore_state(between.to_json())
    next(resumed)
    assert resumed.step == 2
