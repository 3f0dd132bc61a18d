# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""A plan over the samples of a dataset that the user reads."""

import json

import pytest

from energon_ext import ConfigError, StateMismatchError
from energon_ext.loader.plan_sampler import PlanSampler

SOURCES = ["math"] * 10 + ["code"] * 5 + ["math"] * 2
MATH = {*range(10), 15, 16}


def new(sources=SOURCES, weights=None, step=4, **options):
    return PlanSampler(sources, weights, rows_per_step=step, **options)


def by_json(state):
    return json.loads(json.dumps(state))


def shares(indices, size=4):
    """Return how many samples of each step are of the first source."""
    return [
        sum(index in MATH for index in indices[first : first + size])
        for first in range(0, len(indices), size)
    ]


def draw(sampler, count):
    """Take some indices, over as many passes as they need."""
    found = []
    while len(found) < count:
        found += [index for _, index in zip(range(count - len(found)), sampler)]
    return found


def test_every_step_has_the_shares_of_the_weights():
    # 3 of 4 in steps 0 to 2, then 1 of 4; of 17 samples, 4 whole steps are one pass.
    found = draw(new(weights={"math": {"step": {0: 3, 3: 1}}, "code": {"step": {0: 1, 3: 3}}}), 32)
    assert shares(found) == [3, 3, 3, 1, 1, 1, 1, 1]


def test_each_source_is_read_once_before_any_sample_comes_again():
    found = draw(new(weights={"math": 1, "code": 1}), 40)
    of_code = [index for index in found if index not in MATH]
    assert len(of_code) == 20
    assert all(sorted(of_code[n : n + 5]) == [10, 11, 12, 13, 14] for n in range(0, 20, 5))
    assert of_code[:5] != of_code[5:10] or of_code[5:10] != of_code[10:15]  # shuffled again


def test_without_weights_the_shares_are_those_of_the_dataset():
    found = draw(new(samples=17, step=17), 17)
    assert sorted(found) == [*range(17)]


@pytest.mark.parametrize("rule", ["interleave", "blend"])
@pytest.mark.parametrize(("first", "second"), [(1, 4), (4, 2), (2, 1)])
def test_a_resume_on_other_ranks_reads_the_same_samples(rule, first, second):
    weights = {"math": {"linear": {0: 1, 12: 5}}, "code": 2}
    expected = draw(new(weights=weights, rule=rule), 48)

    def ranks(count, state=None):
        samplers = [new(weights=weights, rule=rule, rank=n, ranks=count) for n in range(count)]
        for sampler in samplers:
            if state is not None:
                sampler.load_state_dict(state)
        return samplers

    def read(samplers, count):
        each = [draw(sampler, count // len(samplers)) for sampler in samplers]
        return [index for together in zip(*each) for index in together]

    before = ranks(first)
    begin = read(before, 20)
    states = [sampler.state_dict() for sampler in before]
    assert all(state == states[0] for state in states)
    assert begin + read(ranks(second, by_json(states[0])), 28) == expected


@pytest.mark.parametrize("count", [0, 1, 5, 16, 18])
def test_a_state_is_saved_after_any_sample(count):
    sampler = new(weights={"math": 1, "code": 2})
    draw(sampler, count)
    again = new(weights={"math": 1, "code": 2})
    again.load_state_dict(by_json(sampler.state_dict()))
    assert draw(again, 30) == draw(sampler, 30)


def test_a_pass_ends_after_its_samples_and_the_next_goes_on():
    sampler = new(samples=6, weights={"math": 1, "code": 1})
    passes = [list(sampler) for _ in range(4)]
    assert [len(each) for each in passes] == [6] * 4 and len(sampler) == 6
    assert sum(passes, []) == draw(new(weights={"math": 1, "code": 1}), 24)


def test_a_resume_may_change_weights_and_sources_and_names_what_changed():
    before = new(weights={"math": 1, "code": 1})
    read = draw(before, 12)
    sources = [*SOURCES, "new", "new"]
    after = new(sources, {"math": 0, "code": 1, "new": 3})
    after.load_state_dict(before.state_dict())
    assert [(each.key, each.change) for each in after.changes] == [
        ("code", "kept"),
        ("math", "kept"),
        ("new", "new"),
    ]
    later = draw(after, 8)
    assert all(index not in MATH for index in later)
    # Six of the first twelve and two later ones: an epoch of five, and three of the next.
    of_code = [index for index in [*read, *later] if 10 <= index < 15]
    assert sorted(of_code[:5]) == [10, 11, 12, 13, 14]
    assert len(of_code) == 8 and len({*of_code[5:]}) == 3


def test_limits_end_the_plan():
    sampler = new(weights={"math": 1, "code": 1}, max_epochs={"math": 1, "code": 2})
    assert len(sampler) == 22
    found = list(sampler)
    assert sorted(found) == sorted([*range(17), *range(10, 15)])
    assert list(sampler) == []


def test_the_length_is_that_of_the_pass_also_of_the_last_one():
    """17 samples in all, in passes of 8: two whole ones, and one of the last sample."""
    sampler = new(max_epochs={"math": 1, "code": 1}, samples=8)
    found = []
    for expected in (8, 8, 1):
        assert len(sampler) == expected
        found.append(len([*sampler]))
    assert found == [8, 8, 1]
    assert len(new(max_epochs={"math": 1, "code": 1}, samples=1000)) == 17


def test_samples_that_were_added_or_removed_are_refused():
    state = new().state_dict()
    with pytest.raises(StateMismatchError, match="The source grew by 1: move what was added"):
        new([*SOURCES, "code"]).load_state_dict(state)
    with pytest.raises(StateMismatchError, match="code: documents: saved 5, now 4"):
        new([*SOURCES[:10], *SOURCES[11:]]).load_state_dict(state)
    with pytest.raises(StateMismatchError, match="seed: saved 0, now 1"):
        new(seed=1).load_state_dict(state)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": {"math": 1}}, "weights: none of code"),
        ({"weights": {"math": 1, "code": 1, "coed": 1}}, "weights: no source 'coed'"),
        ({"weights": {"math": 1, "code": -1}}, "weight of code: -1 is not a finite number"),
        ({"max_epochs": {"codes": 1}}, "max_epochs: no source 'codes'"),
        ({"max_epochs": {"code": 0}}, "max_epochs of code: 0 found"),
        ({"rule": "mix"}, "rule: 'mix' found, one of interleave, blend"),
        ({"rank": 2, "ranks": 2}, "rank 2 found; it must be below 2"),
        ({"rank": "1", "ranks": 2}, "rank: '1' found, an integer >= 0"),
        ({"sources": []}, "sources: none found; name the source of each sample"),
        ({"samples": 6, "ranks": 4}, "samples: 6 found, a multiple of 4 ranks"),
        ({"sources": ["a", None]}, "None found for sample 1, a name is needed"),
        ({"schedule_axis": "batches"}, "schedule_axis: batches found"),
    ],
)
def test_a_wrong_argument_is_named(options, message):
    with pytest.raises(ConfigError, match=message):
        new(**options)


def test_another_epoch_of_a_loop_is_refused():
    """As accelerate announces them; it does not say which one a run resumes in."""
    sampler = new()
    sampler.set_epoch(0)
    assert draw(sampler, 5) == draw(new(), 5)
    with pytest.raises(ConfigError, match="epoch 1 of a loop found; let its first epoch be the wh"):
        sampler.set_epoch(1)


def test_ranks_that_could_not_draw_equally_many_are_refused():
    limits = {"math": 1, "code": 1}
    with pytest.raises(ConfigError, match="17 found, a multiple of 2 ranks is needed"):
        new(max_epochs=limits, ranks=2, samples=16)


@pytest.mark.parametrize(("seed", "step"), [(0, 6), (1, 7), (10, 4)])
def test_a_run_that_ends_inside_a_step_continues_after_any_of_its_samples(seed, step):
    """Seeds with which the last step has places without a sample before others with one."""
    sources = ["a"] * 6 + ["b"] * 4

    def sampler():
        return new(sources, step=step, rule="blend", seed=seed, max_epochs={"a": 1, "b": 1})

    expected = list(sampler())
    assert sorted(expected) == [*range(10)]
    for read in range(11):
        before, after = sampler(), sampler()
        draw(before, read)
        after.load_state_dict(before.state_dict())
        assert [*after] == expected[read:]
