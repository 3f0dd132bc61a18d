# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Samples of small streamed sources are spread over all workers, and stay there over resumes."""

import json
from collections import Counter

import pytest
from megatron.energon import DefaultTaskEncoder, TextSample, stateless

from energon_ext import DynamicBlendMixin, get_train_dataset
from energon_ext.plan.lookup import find_blend
from energon_ext.streamed.spread import line_up
from tests.support import config, loader_for, write_dataset, write_mix


class Texts(DynamicBlendMixin, DefaultTaskEncoder[TextSample, TextSample, list, list]):
    """Streams samples."""

    plan_samples = False
    decoder = None

    @stateless
    def batch(self, samples):
        return [sample.text for sample in samples]


COUNTS = {"web": 55, "code": 7, "books": 55, "a": 2, "b": 11, "c": 10}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    root = tmp_path_factory.mktemp("data")
    for name, count in COUNTS.items():
        write_dataset(root / name, [f"{name}{n:02d}" for n in range(count)])
    write_mix(root / "large.yaml", [("web", 1), ("code", 1), ("books", 1)])
    write_mix(root / "turned.yaml", [("books", 1), ("code", 1), ("web", 1)])
    write_mix(root / "two.yaml", [("b", 1), ("c", 1)])
    write_mix(root / "three.yaml", [("a", 1), ("c", 1), ("b", 1)])
    write_mix(root / "one.yaml", [("c", 1)])
    return root


def dataset(path, rank, ranks, **options):
    options = {"batch_size": 1, "shuffle_buffer_size": None, "repeat": False, **options}
    worker_config = config(rank=rank, world_size=ranks)
    return get_train_dataset(path, worker_config=worker_config, task_encoder=Texts(), **options)


def spread_of(path, ranks, some=None):
    """Return how many samples of each source each rank has, or some ranks."""
    spread = []
    for rank in some or range(ranks):
        blend = find_blend(dataset(path, rank, ranks))
        spread.append({key: source.rows.len_worker(0) for key, source in blend.sources.items()})
    return spread


@pytest.mark.parametrize("ranks", [25, pytest.param(100, marks=pytest.mark.nightly)])
def test_small_sources_are_spread_over_all_ranks(data, ranks):
    spread = spread_of(data / "large.yaml", ranks)
    counts = Counter(sum(each.values()) for each in spread)
    fewest, more = divmod(117, ranks)  # 100 ranks: 83 read one sample, 17 read two
    assert counts == {fewest: ranks - more, fewest + 1: more}
    assert spread_of(data / "turned.yaml", ranks, range(3)) == spread[:3]


def read_on(path, ranks, states=None, most=100):
    """Read up to ``most`` samples on each rank; return all samples, and the states after them."""
    texts, after = Counter(), []
    for rank in range(ranks):
        loader = loader_for(dataset(path, rank, ranks))
        if states is not None:
            loader.load_state_dict(json.loads(json.dumps(states[rank])))
        for _, batch in zip(range(most), loader):
            texts.update(text.decode() for text in batch)
        after.append(loader.state_dict())
    return texts, after


def once(*names):
    """Return each sample of some sources, counted once."""
    return Counter(f"{name}{n:02d}" for name in names for n in range(COUNTS[name]))


def test_sources_that_come_and_go_do_not_move_the_samples_of_others(data):
    read, states = read_on(data / "two.yaml", 3, most=1)
    then, states = read_on(data / "one.yaml", 3, states, most=1)  # without b
    read += then
    then, states = read_on(data / "three.yaml", 3, states)  # with b again, and with a
    assert read + then == once("a", "b", "c")


def test_a_source_keeps_its_place_and_a_new_one_is_added_at_the_end(data):
    blend = find_blend(dataset(data / "three.yaml", 0, 3))
    places = {key: source.spread for key, source in blend.sources.items()}
    assert [place.first for place in places.values()] == [0, 2, 13]  # a, b, c: 2 + 11 + 10 samples
    saved = {"b:train": {"first": 4, "samples": 11}, "gone": {"first": 20, "samples": 10}}
    line_up(blend.sources.values(), saved)
    assert [place.first for place in places.values()] == [30, 4, 32]
