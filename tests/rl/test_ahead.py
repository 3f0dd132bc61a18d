# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Answers that are asked for ahead, while the trainer trains: which weights, resumes, failures."""

import functools
import io
import json
import threading
import time
import zipfile

import numpy as np
import pytest

from energon_ext import ConfigError
from energon_ext.errors import DataExhaustedError, SamplerError, StateFormatError
from energon_ext.keyed import sha256, stable_hash
from energon_ext.rl import RLDataset
from energon_ext.state.schema import check_seal, seal
from tests.rl.policy import WAIT_SECONDS, Policy
from tests.rl.prompts import prompt_dataset, write_sums
from tests.state.mutations import mutations
from tests.support import batch_hash


@pytest.fixture(scope="module")
def sums(tmp_path_factory):
    return write_sums(tmp_path_factory.mktemp("prompts"))


def build(path, policy, **options):
    sizes = {"seq_len": 24, "rows": 2, "groups_per_batch": 3}
    prompts = prompt_dataset(path, prompts_per_call=2)
    synced = {"sync_weights": policy.sync_weights}
    return RLDataset(prompts, policy, **{**sizes, **synced, **options})


def run(dataset, policy, steps):
    """Train; return what each step saw, its counts and the weights after it."""
    found = []
    for _ in range(steps):
        batch = next(dataset).validate()
        policy.train(batch)
        found.append((batch_hash(batch), dataset.metrics, policy.trained))
    return found


@pytest.mark.parametrize("ahead", [1, 3])
def test_a_version_is_asked_for_while_the_version_before_trains(sums, ahead):
    policy = Policy()
    dataset = build(sums, policy, ahead=ahead)
    weights, ages = [policy.trained], []
    for _ in range(12 * ahead):
        policy.train(next(dataset))
        weights.append(policy.trained)
        ages.append(dataset.metrics["staleness"])
    dataset._answers._wait()
    # All are asked with the weights of the first step of a version, if nothing falls short.
    asked = [*dict.fromkeys(each for each, _ in policy.calls)]
    begins = weights[: 12 * ahead : ahead]
    assert [each for each in begins if each in asked] == asked
    assert len(asked) > 6
    # In the end the steps of a version have answers of the one before it, and its surplus.
    assert ages[:ahead] == [*range(ahead)]
    assert all(0 < age <= 5 * ahead for age in ages[-3 * ahead :])


def test_the_groups_of_two_versions_are_asked_for_at_the_start(sums):
    """Two batches of three groups are a step: 12 prompts, as all groups may be of use."""
    policy = Policy()
    dataset = build(sums, policy, ahead=1, batches_per_step=2)
    next(dataset)
    assert sum(count for _, count in policy.calls) == 12


@pytest.mark.parametrize(
    ("ahead", "in_a_file"),
    [
        *[(0, True), (1, False), (3, True)],
        *(
            pytest.param(*each, marks=pytest.mark.nightly)
            for each in [(0, False), (1, True), (3, False)]
        ),
    ],
)
def test_a_resume_continues_exactly_at_every_step(sums, ahead, in_a_file, tmp_path):
    policy = Policy()
    reference, saved = build(sums, policy, ahead=ahead), []
    folder = tmp_path if in_a_file else None
    expected = []
    for _ in range(10):
        state = json.dumps(reference.save_state(folder), allow_nan=False)
        saved.append((state, policy.trained, policy.weights))
        expected += run(reference, policy, 1)
    for stop, (state, trained, weights) in enumerate(saved):
        other = Policy()
        other.trained = trained
        # A server that was started again: it has old weights until it is given others.
        other.weights = weights if stop % 2 else stable_hash("other")
        resumed = build(sums, other, ahead=ahead)
        resumed.restore_state(json.loads(state), folder)
        assert run(resumed, other, 10 - stop) == expected[stop:], stop


def test_a_save_does_not_change_the_run(sums):
    found = []
    for saves in (False, True):
        policy = Policy()
        dataset = build(sums, policy, ahead=2)
        for _ in range(8):
            found += run(dataset, policy, 1)
            if saves:
                dataset.save_state()
    assert found[:8] == found[8:]


def begin_while_answers_wait(sums, **options):
    """Return a policy whose answers wait, and a dataset that has asked for them in a thread."""
    policy = Policy()
    dataset = build(sums, policy, ahead=1, **options)
    answers = dataset._answers
    run(dataset, policy, 1)
    while True:
        answers._collect()
        if answers._calls_ahead() and len(answers.queue.groups) >= 3:
            policy.may_answer.clear()
            run(dataset, policy, 1)
            return policy, dataset
        run(dataset, policy, 1)


def test_a_save_waits_for_answers_in_flight_if_the_resume_must_be_exact(sums):
    policy, dataset = begin_while_answers_wait(sums)
    states = []
    saving = threading.Thread(target=lambda: states.append(dataset.save_state()))
    saving.start()
    time.sleep(0.2)
    assert not states
    policy.may_answer.set()
    saving.join(WAIT_SECONDS)
    assert states[0]["answered"] and not states[0]["drawn"]


def test_the_server_gets_weights_only_while_this_rank_has_nothing_in_flight(sums):
    """Another rank may fall short, and ask for the weights of a step within a version."""
    policy, dataset = begin_while_answers_wait(sums)
    failed = []

    def synchronize():
        try:
            dataset._answers._synchronize(99)
        except AssertionError as error:
            failed.append(error)

    thread = threading.Thread(target=synchronize)
    thread.start()
    time.sleep(0.2)
    assert thread.is_alive()
    policy.may_answer.set()
    thread.join(WAIT_SECONDS)
    assert not failed and policy.weights == policy.trained


def test_otherwise_a_save_does_not_wait_and_the_prompts_are_asked_again(sums):
    policy, dataset = begin_while_answers_wait(sums, exact=False)
    state = dataset.save_state()  # returns, although the policy does not answer
    assert state["drawn"] and not state["answered"]
    numbers = {each["number"] for each in state["drawn"]}
    other = Policy()
    resumed = build(sums, other, ahead=1, exact=False)
    resumed.restore_state(state)
    run(resumed, other, 2)
    assert other.calls[0][1] >= len(numbers)
    policy.may_answer.set()


def test_a_failure_in_the_thread_is_raised_and_its_prompts_are_asked_again(sums):
    policy = Policy()
    dataset = build(sums, policy, ahead=1)
    run(dataset, policy, 1)
    dataset._answers._wait()
    policy.fails = True
    with pytest.raises(SamplerError, match="the sampler raised OSError: server gone. So far: gro"):
        run(dataset, policy, 12)
    assert dataset._answers.drawn
    run(dataset, policy, 3)
    assert not dataset._answers.drawn


def test_prompts_with_max_epochs_are_all_trained_on(sums, tmp_path):
    """19 prompts, one epoch: each is asked once, and its group trained on, if it is of use."""
    names = ("easy", "hard")
    entries = [
        {"path": str(sums.parent / f"{each}.jsonl"), "weight": 1, "max_epochs": 1} for each in names
    ]
    header = {"__module__": "energon_ext", "__class__": "ScheduledMetadataset"}
    path = tmp_path / "capped.yaml"
    path.write_text(json.dumps({**header, "splits": {"train": {"blend": entries}}}))
    policy = Policy()
    dataset, trained = build(path, policy, ahead=2), 0
    with pytest.raises(DataExhaustedError):
        while True:
            policy.train(next(dataset))
            trained += dataset.metrics["valid_groups"]
    assert sum(count for _, count in policy.calls) == dataset.counts["groups"] == 19
    assert trained == dataset.counts["valid_groups"]


def test_stale_groups_count_versions(sums):
    policy = Policy()
    dataset = build(sums, policy, ahead=2, max_staleness=1)
    run(dataset, policy, 12)
    assert dataset.metrics["staleness"] >= 2  # steps
    with pytest.raises(ConfigError, match="max_staleness: 0 found, but with `ahead` all answers"):
        build(sums, policy, ahead=2, max_staleness=0)


def test_a_sampler_of_the_model_in_training_cannot_sample_ahead(sums):
    policy = Policy()
    policy.agree = int
    with pytest.raises(ConfigError, match="ahead: a Policy samples from the model in training"):
        build(sums, policy, ahead=1)


def test_a_file_of_answers_that_is_missing_or_changed_is_refused(sums, tmp_path):
    policy = Policy()
    dataset = build(sums, policy, ahead=1)
    run(dataset, policy, 2)
    state = dataset.save_state(tmp_path)
    (file,) = tmp_path.iterdir()
    assert file.name == state["file"]["name"]
    assert file.name.startswith(f"answers_rank00000_{state['file']['digest'][:16]}")
    restore = functools.partial(build(sums, Policy(), ahead=1).restore_state, state)
    with pytest.raises(StateFormatError, match=f"state has its answers in {file.name}; give"):
        restore()
    content = file.read_bytes()
    for changed in (content[:-1], content[:100] + b"?" + content[101:], b""):
        file.write_bytes(changed)
        with pytest.raises(StateFormatError, match="is damaged, or belongs to another state"):
            restore(tmp_path)
    for hostile in (b"x", packed_tensors(), header_bomb()):  # under a digest of its own
        file.write_bytes(hostile)
        known = {"name": file.name, "digest": sha256(hostile)}
        resealed = seal({**check_seal(state), "file": known})
        with pytest.raises(StateFormatError, match="npz: has no tensors"):
            build(sums, Policy(), ahead=1).restore_state(resealed, tmp_path)
    file.unlink()
    with pytest.raises(StateFormatError, match="cannot be read"):
        restore(tmp_path)
    file.write_bytes(content)
    restore(tmp_path)
    for _, mutated in mutations(state, 50, seed=0):
        with pytest.raises(StateFormatError):
            build(sums, Policy(), ahead=1).restore_state(mutated, tmp_path)


def packed_tensors():
    file = io.BytesIO()
    np.savez_compressed(file, np.zeros(1 << 20))
    return file.getvalue()


def header_bomb():
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as arrays:
        header = b"-" * 9000 + b"1"  # MemoryError of NumPy's parser
        size = len(header).to_bytes(2, "little")
        arrays.writestr("arr_0.npy", b"\x93NUMPY\x01\x00" + size + header)
    return file.getvalue()
