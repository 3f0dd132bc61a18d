# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Blends made in Python, without YAML, of any Energon datasets."""

import itertools
import json
from dataclasses import dataclass

import pytest
from megatron.energon.flavors.base_dataset import SavableDataset

from energon_ext import ConfigError, DynamicBlendDataset, LeastConsumedDataset
from energon_ext.plan.deal import Topology
from energon_ext.plan.lookup import find_blend
from energon_ext.plan.source import Source
from energon_ext.weights import ConstantWeight
from tests.plan.memory_documents import planned
from tests.support import close_loaders, config, drawn_of, loader_for, take


@dataclass
class Sample:
    source: str
    number: int
    num_tokens: int


class Samples(SavableDataset):
    """So many samples of so many tokens."""

    _savable_fields = ("position",)

    def __init__(self, source, tokens, count):
        super().__init__(config())
        self.source, self.tokens, self.count = source, tokens, count
        self.reset_state_own()

    def reset_state_own(self):
        self.position = 0

    def __iter__(self):
        while self.position < self.count:
            self.position += 1
            yield Sample(self.source, self.position, self.tokens)

    def len_worker(self, worker_idx=None):
        return self.count

    def worker_has_samples(self):
        return True

    def config(self):
        return {}


def least_consumed(lengths, *, count=10**6, weights=None, **options):
    sources = [
        Source(
            key,
            Samples(key, tokens, count),
            ConstantWeight((weights or {}).get(key, 1)),
        )
        for key, tokens in lengths.items()
    ]
    return LeastConsumedDataset(sources, worker_config=config(), **options)


def read(dataset, count=None):
    """The sources of the next batches, as a loader with one sample a batch reads them."""
    loader = loader_for(dataset)
    batches = list(loader) if count is None else take(loader, count)
    return loader, "".join(sample.source for sample in batches)


def resumed(dataset, loader):
    dataset.restore_state(dataset_state(loader))
    return dataset


def dataset_state(loader):
    return json.loads(json.dumps(find_blend(loader).save_state()))


def tokens_of(dataset):
    return {key: tokens for key, (_, tokens) in drawn_of(dataset).items()}


def test_energon_is_told_the_class_and_what_is_below_it():
    assert least_consumed({"a": 2, "b": 1}).config() == {
        "type": "LeastConsumedDataset",
        "sources": ["a", "b"],
        "datasets": [{}, {}],
        "worker_config": config().config(),
    }


def test_counters_0_and_100_are_read_a_a_a_b_b_b():
    """Conformance: three samples of two tokens each are left of both."""
    first, _ = read(least_consumed({"b": 2}, count=53), 50)
    assert tokens_of(find_blend(first)) == {"b": 100}
    both = LeastConsumedDataset(
        [Source("a", Samples("a", 2, 3)), Source("b", Samples("b", 2, 53))],
        worker_config=config(),
        new_source="zero",
    )
    loader, order = read(resumed(both, first))
    assert order == "aaabbb"
    assert tokens_of(find_blend(loader)) == {"a": 6, "b": 106}


def test_sources_of_1_3_and_10_tokens_a_sample_differ_by_one_sample_at_most():
    """Conformance: after about 2500 tokens."""
    _, order = read(least_consumed({"o": 1, "t": 3, "x": 10}), 1200)
    counts = {"o": 0, "t": 0, "x": 0}
    for source in order:
        counts[source] += {"o": 1, "t": 3, "x": 10}[source]
        assert max(counts.values()) - min(counts.values()) <= 10
    assert sum(counts.values()) > 2450


@pytest.mark.parametrize(
    ("new_source", "order"), [("baseline", "nonononono"), ("zero", "n" * 60 + "nonono")]
)
def test_a_new_source_begins_level_or_at_zero(new_source, order):
    """Conformance: ``{old: 120}``. From zero, 120 tokens are owed: 60 samples of two."""
    first, _ = read(least_consumed({"old": 2}), 60)
    assert tokens_of(find_blend(first)) == {"old": 120}
    both = least_consumed({"new": 2, "old": 2}, new_source=new_source)
    _, found = read(resumed(both, first), len(order))
    found = found.replace("new", "n").replace("old", "o")
    assert found == order


def test_targets_are_weights_of_tokens_and_not_of_samples():
    loader, _ = read(least_consumed({"a": 30, "b": 2}, weights={"a": 1, "b": 3}), 480)
    counts = tokens_of(find_blend(loader))
    assert abs(3 * counts["a"] - counts["b"]) <= 3 * 30


@pytest.mark.parametrize("make", [DynamicBlendDataset, LeastConsumedDataset])
def test_sources_in_any_order_are_drawn_in_one(make):
    orders = set()
    for keys in itertools.permutations("abcd"):
        sources = [Source(key, Samples(key, 2, 900)) for key in keys]
        orders.add(read(make(sources, worker_config=config()), 200)[1])
        close_loaders()
    assert len(orders) == 1


def test_sources_need_keys_of_their_own_and_a_start_that_is_known():
    one, other = Source("a", Samples("a", 1, 9)), Source("a", Samples("a", 1, 9))
    for sources in ([], [one, other]):
        with pytest.raises(ConfigError, match="distinct keys"):
            LeastConsumedDataset(sources, worker_config=config())
    with pytest.raises(ConfigError, match="new_source: 'later' found, baseline or zero"):
        LeastConsumedDataset([one], worker_config=config(), new_source="later")


def test_rows_that_are_drawn_anew_twice_in_a_step_are_drawn_by_chance_each_time():
    """Of 10000 rows `a` has one and `b` some for those of `a`; `c` and `d` share the others."""
    lengths = {"a": 1, "b": 2600, "c": 9000, "d": 9000}
    sources = [Source(key, planned([16] * count, epochs=1)) for key, count in lengths.items()]
    blend = DynamicBlendDataset(sources, topology=Topology(10_000), worker_config=config())
    next(blend.planned_steps())
    a, b, c, d = blend.plan.documents.tolist()
    assert (a, b, c + d) == (1, 2600, 7399)
    assert abs(c - d) < 400  # five standard deviations


def test_planned_sources_need_no_padding_to_be_read():
    """Rows of two tokens each; one plan of one row a step."""
    sources = [
        Source(key, planned([3] * 5, packing="sequential", seq_len=2, epochs=1)) for key in "ab"
    ]
    rows = list(LeastConsumedDataset(sources, worker_config=config()))
    # A stream of 15 tokens is 7 rows of two.
    assert len(rows) == 14
