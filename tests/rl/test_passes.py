# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Several steps, and several passes, on answers that were sampled together."""

import dataclasses
import json

import pytest

from energon_ext import ConfigError, StateMismatchError
from energon_ext.rl import RLDataset
from tests.rl.policy import Policy
from tests.rl.prompts import Dice, prompt_dataset, write_sums
from tests.support import batch_hash, write_mix


@pytest.fixture(scope="module")
def sums(tmp_path_factory):
    return write_sums(tmp_path_factory.mktemp("prompts"))


def build(path, sampler=None, prompts_per_call=2, **options):
    sizes = {"seq_len": 24, "rows": 2, "groups_per_batch": 2, "batches_per_step": 2}
    return RLDataset(
        prompt_dataset(path, prompts_per_call=prompts_per_call),
        sampler or Dice(),
        **{**sizes, **options},
    )


def test_a_step_is_repeated_with_its_batches_in_the_same_order(sums):
    once = build(sums)
    a, b, c, d = (batch_hash(next(once)) for _ in range(4))
    assert len({a, b, c, d}) == 4
    synchronized = []
    dataset = build(sums, epochs_per_batch=3, sync_weights=synchronized.append)
    found, ages, steps = [], [], []
    for _ in range(12):
        found.append(batch_hash(next(dataset).validate()))
        ages.append(dataset.metrics["staleness"])
        steps.append(dataset.step)
    assert found == [a, b] * 3 + [c, d] * 3
    assert steps == [0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6]
    # Groups that waited for the second version are three steps older.
    assert ages[:6] == [0, 0, 1, 1, 2, 2]
    assert synchronized == [0, 3]
    assert dataset.counts["batches"] == 12
    assert dataset.metrics["attempts_per_batch"] == 0


@pytest.mark.parametrize("passes", [1, 2])
def test_the_steps_of_a_version_train_on_parts_of_answers_that_are_asked_when_it_begins(
    sums, passes
):
    policy, synchronized = Policy(), []

    def sync_weights(step):
        synchronized.append(step)
        policy.sync_weights(step)

    dataset = build(
        sums, policy, steps_per_version=3, epochs_per_batch=passes, sync_weights=sync_weights
    )
    weights, found, asked = [], [], []
    for _ in range(3 * 3 * passes):
        weights.append(policy.trained)
        batches = [next(dataset).validate() for _ in range(2)]
        policy.train(batches[1])
        found.append([*map(batch_hash, batches)])
        asked.append({each for each, _ in policy.calls})
        policy.calls.clear()
    begins = [*range(0, 3 * 3 * passes, 3 * passes)]
    assert synchronized == begins
    assert [step for step, each in enumerate(asked) if each] == begins
    assert [asked[step] for step in begins] == [{weights[step]} for step in begins]
    for begin in begins:
        parts = found[begin : begin + 3]
        assert len({each for part in parts for each in part}) == 6
        assert found[begin : begin + 3 * passes] == parts * passes


def test_the_parts_of_a_version_are_the_steps_of_a_run_that_asks_at_each_step(sums):
    """The answers of dice do not depend on the weights."""
    once = build(sums)
    expected = [batch_hash(next(once)) for _ in range(18)]
    dataset = build(sums, steps_per_version=3)
    assert [batch_hash(next(dataset)) for _ in range(18)] == expected
    assert dataset.step == 9


@pytest.mark.parametrize("passes", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_a_resume_continues_exactly_inside_a_version(sums, passes):
    def run(dataset, policy, batches):
        found = []
        for _ in range(batches):
            batch = next(dataset)
            if dataset._place.batches == 0:
                policy.train(batch)
            found.append((batch_hash(batch), dataset.metrics, policy.trained))
        return found

    options = {"steps_per_version": 3, "epochs_per_batch": passes, "max_staleness": 1}
    policy = Policy()
    reference = build(sums, policy, sync_weights=policy.sync_weights, **options)
    saved, expected = [], []
    for _ in range(20):
        saved.append((json.dumps(reference.save_state()), policy.trained))
        expected += run(reference, policy, 1)
    for stop, (state, trained) in enumerate(saved):
        other = Policy()
        other.trained = trained
        resumed = build(sums, other, sync_weights=other.sync_weights, **options)
        resumed.restore_state(json.loads(state))
        assert run(resumed, other, 20 - stop) == expected[stop:], stop


def test_a_resume_continues_exactly_inside_a_pass(sums):
    reference, states, expected = build(sums, epochs_per_batch=2), [], []
    for _ in range(10):
        states.append(json.dumps(reference.save_state()))
        expected.append((batch_hash(next(reference)), reference.metrics, reference.step))
    for stop, state in enumerate(states):
        resumed = build(sums, epochs_per_batch=2)
        resumed.restore_state(json.loads(state))
        assert json.dumps(resumed.save_state()) == state
        found = [
            (batch_hash(next(resumed)), resumed.metrics, resumed.step) for _ in range(10 - stop)
        ]
        assert found == expected[stop:]


def test_answers_are_kept_only_until_the_last_pass(sums):
    dataset, kept = build(sums, epochs_per_batch=2), []
    for _ in range(5):
        next(dataset)
        kept.append([len(groups) for groups in dataset.save_state()["kept"]])
    assert kept == [[2], [2, 2], [2, 2], [], [2]]
    alone = build(sums)
    next(alone)
    assert alone.save_state()["kept"] == []


def test_stale_groups_count_versions_and_not_passes(sums):
    """A version uses two groups of up to four, and the others wait for the next version."""

    def dropped(**options):
        dataset = build(sums, epochs_per_batch=2, batches_per_step=1, prompts_per_call=4, **options)
        for _ in range(12):
            next(dataset)
        return dataset.counts["stale_groups"]

    assert dropped(max_staleness=1) == 0 < dropped(max_staleness=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epochs_per_batch": 1}, "epochs_per_batch: saved 2, now 1.*before the last pass"),
        ({"batches_per_step": 1}, "batches_per_step: saved 2, now 1"),
        ({"steps_per_version": 2}, "steps_per_version: saved 1, now 2"),
    ],
)
def test_the_passes_change_only_after_the_last_one(sums, change, message):
    dataset = build(sums, epochs_per_batch=2)
    for _ in range(2):
        next(dataset)
    inside = dataset.save_state()
    changed = {"epochs_per_batch": 2, **change}
    with pytest.raises(StateMismatchError, match=message):
        build(sums, **changed).restore_state(inside)
    states = [dataclasses.replace(dataset._state(), rank=rank, ranks=2) for rank in range(2)]
    with pytest.raises(StateMismatchError, match="ranks: saved 2, now 1"):
        build(sums, epochs_per_batch=2).restore_state([state.to_json() for state in states])
    for _ in range(2):
        next(dataset)
    resumed = build(sums, **changed)
    resumed.restore_state(dataset.save_state())
    next(resumed)


def test_rows_that_are_too_short_to_repeat_a_step_are_refused(sums):
    dataset = build(sums, epochs_per_batch=2)
    next(dataset)
    resumed = build(sums, epochs_per_batch=2, seq_len=9)
    with pytest.raises(ConfigError, match="seq_len, rows: the answers of a step that must be rep"):
        resumed.restore_state(dataset.save_state())


def test_the_number_of_passes_changes_only_between_versions(sums):
    dataset = build(sums, steps_per_version=2, batches_per_step=1)
    next(dataset)
    resumed = build(sums, steps_per_version=2, batches_per_step=1, epochs_per_batch=2)
    with pytest.raises(StateMismatchError, match="epochs_per_batch: saved 1, now 2"):
        resumed.restore_state(dataset.save_state())
    next(dataset)
    resumed.restore_state(dataset.save_state())
    found = [batch_hash(next(resumed)) for _ in range(4)]
    assert found[:2] == found[2:]


def test_a_source_stays_until_the_last_pass_over_its_answers(sums):
    dataset = build(sums, epochs_per_batch=2)
    for _ in range(2):
        next(dataset)
    inside = dataset.save_state()
    for _ in range(2):
        next(dataset)
    between = dataset.save_state()
    path = write_mix(sums.with_name("easy.yaml"), [("easy.jsonl", 1)])
    message = "Keep hard.jsonl until the last pass over its answers"
    with pytest.raises(StateMismatchError, match=message):
        build(path, epochs_per_batch=2).restore_state(inside)
    resumed = build(path, epochs_per_batch=2)
    resumed.restore_state(between)
    first, again = next(resumed), [next(resumed) for _ in range(2)][1]
    assert batch_hash(first) == batch_hash(again)


def test_passes_and_steps_must_be_at_least_one(sums):
    with pytest.raises(ConfigError, match="epochs_per_batch: 0 found"):
        build(sums, epochs_per_batch=0)
    with pytest.raises(ConfigError, match="steps_per_version: 0 found"):
        build(sums, steps_per_version=0)


def test_answers_asked_ahead_already_have_their_steps_per_version(sums):
    with pytest.raises(ConfigError, match="steps_per_version: 3 found, but ahead=2 says how many"):
        build(sums, steps_per_version=3, ahead=2)
