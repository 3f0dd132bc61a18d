# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Sampling ahead for a split model: one rank asks in a thread, and all receive its answers."""

import functools
import json
import threading

import pytest
import torch.distributed as dist

from energon_ext import ConfigError, PromptTaskEncoder, get_train_dataset
from energon_ext.errors import SamplerError
from energon_ext.keyed import stable_hash
from energon_ext.megatron import create_replica_group, data_parallel_worker_config
from energon_ext.rl import RLDataset
from energon_ext.tokenizers.tokenizers import ByteTokenizer
from tests.megatron.small_gpt import model_parallel
from tests.megatron.small_training import run_ranks
from tests.rl.policy import WAIT_SECONDS, Policy
from tests.rl.prompts import write_sums
from tests.support import batch_hash

TENSORS = {"tensor_model_parallel_size": 2}
STEPS = 9


def on_all(value):
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


class HeldPolicy(Policy):
    """A server that one rank may ask, and that answers to a thread only with a permit.

    Its weights depend on the batches of all ranks.
    """

    def __init__(self, may_be_asked):
        super().__init__()
        self.may_be_asked = may_be_asked
        self.permits = threading.Semaphore(0)

    def sample_and_score_batch(self, prompts, seeds):
        assert self.may_be_asked, "only the first rank of a replica asks"
        if threading.current_thread() is not threading.main_thread():
            assert self.permits.acquire(timeout=WAIT_SECONDS)
        return super().sample_and_score_batch(prompts, seeds)

    def train(self, batch):
        self.trained = stable_hash(f"{self.trained}/{on_all(batch_hash(batch))}")


class Trainer:
    """A rank of a split model, with a policy and a dataset."""

    def __init__(self, path, group, **options):
        self.is_first = group.rank() == 0
        self.policy = HeldPolicy(self.is_first)
        prompts = get_train_dataset(
            path,
            worker_config=data_parallel_worker_config(num_workers=0),
            batch_size=2,
            task_encoder=PromptTaskEncoder(ByteTokenizer(add_eos=False)),
        )
        self.dataset = RLDataset(
            prompts,
            self.policy,
            replica_group=group,
            sync_weights=self.policy.sync_weights,
            **{"seq_len": 24, "rows": 2, "groups_per_batch": 3, "ahead": 2, **options},
        )
        answers = self.dataset._answers
        answers._collect = self._release_before(answers._collect)
        answers._wait = self._release_before(answers._wait)

    def _release_before(self, waits):
        def release_and_wait():
            self.release()
            waits()

        return release_and_wait

    def is_held(self):
        """Return True if answers are held back from this rank."""
        request = self.dataset._answers.request
        return self.is_first and request is not None and not request._answers.done()

    def release(self):
        """Let the server answer what it was asked ahead."""
        if self.is_held():
            self.policy.permits.release()
            self.dataset._answers.request.wait()

    def run(self, steps):
        """Train; return what each step saw. Answers are held back until the trainer waits."""
        found = []
        for _ in range(steps):
            batch = next(self.dataset).validate()
            self.policy.train(batch)
            found.append([batch_hash(batch), self.dataset.metrics, self.policy.trained])
        return found

    def save(self):
        """Return the states of all replicas, and which of them had answers in flight."""
        state, held = None, self.is_held()
        if self.is_first:
            states = []
            saving = threading.Thread(target=lambda: states.append(self.dataset.save_state()))
            saving.start()
            if self.dataset.exact:
                self.release()  # the save waits for it
            saving.join(WAIT_SECONDS)
            state = json.dumps(states[0])
        elif self.dataset._answers.request is not None:
            with pytest.raises(ConfigError, match="only the first rank of a replica_group has"):
                self.dataset.save_state()
        return [each for each in on_all(state) if each is not None], on_all(held)


def resumes(path, group):
    """Save after each step, with answers in flight; compare resumed runs with a whole one."""
    whole = Trainer(path, group)
    expected = whole.run(STEPS)
    whole.release()
    first, equal, held = Trainer(path, group), [], []
    for stop in range(STEPS):
        states, held_now = first.save()
        held.append(any(held_now))
        resumed = Trainer(path, group)
        resumed.policy.trained = resumed.policy.weights = first.policy.trained
        resumed.dataset.restore_state([*map(json.loads, states)][::-1])
        equal.append(resumed.run(STEPS - stop) == expected[stop:])
        resumed.release()
        first.run(1)
    first.release()
    return {"steps": expected, "equal": equal, "held": held}


def resume_without_waiting(path, group):
    """Save while answers are in flight, without them; return what the resumed ranks saw."""
    first = Trainer(path, group, exact=False)
    first.run(1)
    while not any(on_all(first.is_held())):
        first.run(1)
    states, held = first.save()
    first.release()
    resumed = Trainer(path, group, exact=False)
    resumed.policy.trained = first.policy.trained
    resumed.dataset.restore_state([*map(json.loads, states)])
    waiting = sum(len(json.loads(each)["drawn"]) for each in states)
    found = resumed.run(6)
    resumed.release()
    return {"steps": found, "held": sum(held), "drawn": waiting}


def failure(path, group):
    """Let the server fail once while it is asked ahead; return the error and the steps after it."""
    trainer = Trainer(path, group)
    trainer.run(1)
    trainer.policy.fails = dist.get_rank() == 0
    with pytest.raises(SamplerError) as error:
        trainer.run(20)
    kept = [each.number for each in trainer.dataset._answers.drawn]
    found = trainer.run(4)
    trainer.release()
    return {"message": str(error.value), "kept": kept, "steps": found}


def all_results(path):
    with model_parallel(**TENSORS):
        group = create_replica_group()
        return {
            "resumes": resumes(path, group),
            "without waiting": resume_without_waiting(path, group),
            "failure": failure(path, group),
        }


@pytest.fixture(
    scope="module", params=[2, pytest.param(4, marks=pytest.mark.nightly)], ids=["one", "two"]
)
def replicas(request, tmp_path_factory):
    """The results of both ranks of one replica, or of two."""
    path = write_sums(tmp_path_factory.mktemp("prompts"))
    work = functools.partial(all_results, path)
    ranks = run_ranks(request.param, work, tmp_path_factory.mktemp("ranks"))
    return [*zip(ranks[::2], ranks[1::2])]


def test_a_save_in_mid_flight_resumes_exactly_on_all_ranks(replicas):
    for first, second in replicas:
        assert first["resumes"] == second["resumes"]
        assert first["resumes"]["equal"] == [True] * STEPS
        assert sum(first["resumes"]["held"]) > 2
        ages = [metrics["staleness"] for _, metrics, _ in first["resumes"]["steps"]]
        assert ages[0] == 0 and max(ages) >= 2


def test_without_waiting_the_prompts_in_flight_are_asked_again_by_one_rank(replicas):
    for first, second in replicas:
        assert first["without waiting"] == second["without waiting"]
        assert first["without waiting"]["held"] and first["without waiting"]["drawn"]


def test_an_error_in_the_thread_of_one_rank_is_raised_on_all(replicas):
    messages = [rank["failure"]["message"] for replica in replicas for rank in replica]
    assert "the sampler raised OSError: server gone" in messages[0]
    assert messages[1].startswith("On rank 0: Prompt ") and "server gone" in messages[1]
    assert all("another rank failed" in each for each in messages[2:])
    for first, second in replicas:
        assert first["failure"]["kept"] == second["failure"]["kept"]
        assert first["failure"]["steps"] == second["failure"]["steps"]
    assert replicas[0][0]["failure"]["kept"]  # the prompts, which are asked again
