# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Choice of sources: by schedules at their batch, or by least consumed tokens."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest
from megatron.energon.wrappers.batch_dataset import BatchDataset

from energon_ext import (
    BlendDataset,
    ConfigError,
    DynamicBlendDataset,
    LeastConsumedDataset,
    ScheduleAxis,
    WeightSpec,
)
from energon_ext.plan.clock import Clock
from energon_ext.plan.topology import Topology
from energon_ext.weights import weight_from_config
from tests.mixture.slow import places_of_equals
from tests.streamed.numbers import Numbers, blend, drawn_of, order_of, resumed, source
from tests.support import close_loaders, config, loader_for, take

#: The seed of the first worker of a run with the seed 0.
FIRST_WORKER = "0/worker 0"

# Schedules ----------------------------------------------------------------------------------------

SCHEDULES = {
    "a": {"step": {0: 1, 20: 0, 30: 2}},
    "b": {"linear": {0: 0, 20: 3, 40: 0}},
    "c": {"step": {0: 0, 35: 1}},
}


def batches_of(rule, *, rank=0, ranks=1, workers=0, batch=4, count=60, axis=None, rows=None):
    """Return the sources of each of the next batches of a rank."""
    of = config(workers, rank, ranks)
    clock = Clock(axis or ScheduleAxis(), Topology.of(of, batch, rows))
    sources = [source(key, weight=weight, of=of) for key, weight in SCHEDULES.items()]
    drawn = BatchDataset(blend(sources, rule, of, clock=clock), batch, order_of, worker_config=of)
    return take(loader_for(drawn), count)


@pytest.mark.parametrize("rule", ["blend", "interleave"])
@pytest.mark.parametrize(("rank", "ranks", "workers"), [(0, 1, 0), (1, 3, 0), (2, 3, 0), (1, 2, 2)])
def test_a_source_is_drawn_only_while_its_weight_is_positive(rule, rank, ranks, workers):
    specs = {key: weight_from_config(weight) for key, weight in SCHEDULES.items()}
    for step, batch in enumerate(batches_of(rule, rank=rank, ranks=ranks, workers=workers)):
        assert {key for key in batch if specs[key].evaluate(step) == 0} == set(), step
    drawn = Counter("".join(batches_of(rule, rank=rank, ranks=ranks, workers=workers)))
    due = Counter()
    for step in range(60):
        values = {key: spec.evaluate(step) for key, spec in specs.items()}
        due.update({key: 4 * value / sum(values.values()) for key, value in values.items()})
    for key, share in due.items():
        slack = 5 * math.sqrt(share) if rule == "blend" else 3 * max(1, workers)
        assert abs(drawn[key] - share) <= slack


@pytest.mark.parametrize(
    ("axis", "rows", "first"),
    [
        (None, 4 * 2, 35),  # a step is one batch of each of two ranks
        (None, 4 * 2 * 3, 105),  # three batches of each rank
        (ScheduleAxis("batches"), 4 * 2 * 3, 35),
    ],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_every_rank_applies_a_weight_at_the_same_batch(axis, rows, first, rank):
    """From 35 on, ``c`` has a weight of 1 of at most 3.75: it is drawn soon after, not before."""
    batches = batches_of("interleave", rank=rank, ranks=2, count=130, axis=axis, rows=rows)
    assert first <= next(n for n, batch in enumerate(batches) if "c" in batch) <= first + 2


def test_the_error_for_all_zero_weights_names_position_and_sources():
    weights = {"a": {"step": {0: 1, 7: 0}}, "b": 0}
    loader = loader_for(blend([source(key, weight=weight) for key, weight in weights.items()]))
    assert order_of(take(loader, 7)) == "a" * 7
    with pytest.raises(ConfigError, match="^Every weight is 0 at step 7 .* left: a, b. Give"):
        take(loader, 1)


def test_a_scheduled_blend_that_no_loader_iterates_has_no_batch_index():
    weight = {"step": {0: 1, 9: 2}}
    with pytest.raises(ConfigError, match="without a loader.*get_savable_loader"):
        next(iter(blend([source("a", weight=weight)])))


@pytest.mark.parametrize("rule", ["blend", "interleave"])
def test_a_blend_of_constant_weights_needs_no_loader(rule):
    def sources():
        return [source("a", weight=3), source("b")]

    alone = order_of(itertools.islice(blend(sources(), rule), 40))
    assert alone == order_of(take(loader_for(blend(sources(), rule)), 40))
    assert BlendDataset is DynamicBlendDataset


def test_the_weight_of_a_yaml_value_is_also_a_method_of_its_class():
    weight = {"linear": {0: 0, 10: 5}}
    assert WeightSpec.from_config(weight) == weight_from_config(weight)
    assert WeightSpec.from_config(weight).evaluate(4) == 2


@pytest.mark.parametrize("rule", ["blend", "interleave"])
def test_source_order_does_not_matter(rule):
    orders = set()
    for keys in itertools.permutations("abcd"):
        orders.add(order_of(take(loader_for(blend([source(key) for key in keys], rule)), 60)))
        close_loaders()
    assert len(orders) == 1


def test_energons_config_contains_the_class_and_nested_datasets():
    rows = {"a": Numbers("a", 9), "b": Numbers("b", 9)}
    dataset = blend([source(key, 9, endless=False) for key in rows], "interleave")
    assert dataset.config() == {
        "type": "LeastConsumedDataset",
        "sources": ["a", "b"],
        "datasets": [{"source": "a"}, {"source": "b"}],
        "worker_config": config().config(),
    }


def test_sources_need_distinct_keys_and_a_known_start():
    for sources in ([], [source("a"), source("a")]):
        with pytest.raises(ConfigError, match="distinct keys"):
            blend(sources)
    with pytest.raises(ConfigError, match="new_source: 'later' found, one of baseline, zero"):
        blend([source("a")], "interleave", new_source="later")


# Least consumed -----------------------------------------------------------------------------------


def test_a_source_at_zero_catches_up_with_one_at_100_first():
    """Conformance: both sources have three samples of two tokens left."""
    first = loader_for(blend([source("b", 53, tokens=2, endless=False)], "interleave"))
    take(first, 50)
    assert drawn_of(first) == {"b": (50, 100)}
    both = [source("a", 3, tokens=2, endless=False), source("b", 53, tokens=2, endless=False)]
    loader = resumed(blend(both, "interleave", new_source="zero"), first)
    assert order_of(loader) == "aaabbb"
    assert drawn_of(loader) == {"a": (3, 6), "b": (53, 106)}


def least_consumed(lengths, weights, count):
    """Yield the sources as required: always the one furthest behind its share of tokens."""
    read = dict.fromkeys(lengths, 0)
    total = sum(weights.values())
    places = dict(zip(sorted(lengths), places_of_equals(len(lengths), FIRST_WORKER)))
    for _ in range(count):
        tokens = sum(read.values())
        # The draw itself counts as one future token.
        behind = {key: (tokens + 1) * weights[key] - total * read[key] for key in sorted(lengths)}
        key = max(behind, key=lambda key: (behind[key], -places[key]))
        read[key] += lengths[key]
        yield key


@pytest.mark.parametrize(
    ("lengths", "weights"),
    [
        ({"a": 2, "b": 2}, {"a": 1, "b": 1}),
        ({"o": 1, "t": 3, "x": 10}, {"o": 1, "t": 1, "x": 1}),
        ({"a": 30, "b": 2}, {"a": 1, "b": 3}),
        ({"a": 64, "b": 64, "c": 64}, {"a": 1, "b": 2, "c": 5}),
    ],
)
def test_the_source_furthest_behind_its_share_is_next(lengths, weights):
    sources = [source(key, tokens=n, weight=weights[key]) for key, n in lengths.items()]
    expected = "".join(least_consumed(lengths, weights, 1200))
    assert order_of(take(loader_for(blend(sources, "interleave")), 1200)) == expected


def test_sources_of_1_3_and_10_tokens_per_sample_stay_within_one_sample():
    """Conformance, over about 2500 tokens."""
    lengths = {"o": 1, "t": 3, "x": 10}
    loader = loader_for(blend([source(k, tokens=n) for k, n in lengths.items()], "interleave"))
    counts = dict.fromkeys(lengths, 0)
    for sample in take(loader, 1200):
        counts[sample.source] += sample.num_tokens
        assert max(counts.values()) - min(counts.values()) <= 10
    assert sum(counts.values()) > 2450


@pytest.mark.parametrize(("new_source", "owed"), [("baseline", 0), ("zero", 60)])
def test_a_new_source_begins_level_or_at_zero(new_source, owed):
    """Conformance: ``{old: 120}``. From zero, 120 tokens are owed: 60 samples of two."""
    order = "n" * owed + 5 * ("no" if places_of_equals(2, FIRST_WORKER) == [0, 1] else "on")
    first = loader_for(blend([source("o", tokens=2)], "interleave"))
    take(first, 60)
    assert drawn_of(first) == {"o": (60, 120)}
    both = [source("n", tokens=2), source("o", tokens=2)]
    loader = resumed(blend(both, "interleave", new_source=new_source), first)
    assert order_of(take(loader, len(order))) == order


@pytest.mark.parametrize("rank", [0, 1, 2, 3])
def test_the_debt_to_a_new_source_ignores_where_a_worker_began(rank):
    """Two sources have read 120 tokens; the new one gets half: about 60 samples of two."""
    of = config(rank=rank, world_size=4)
    first = loader_for(blend([source(k, tokens=2, of=of) for k in "ab"], "interleave", of))
    take(first, 60)
    three = [source(k, tokens=2, weight=w, of=of) for k, w in (("a", 1), ("b", 1), ("n", 2))]
    loader = resumed(blend(three, "interleave", of, new_source="zero"), first)
    order = order_of(take(loader, 90))
    assert 57 <= min(order.index("a"), order.index("b")) <= 63


def test_the_debt_to_a_new_source_uses_the_weights_at_the_resume():
    """At the resume, after 10 batches of 5 samples, the weight is 1; from 30 on it is 0."""

    def loader(*sources):
        dataset = blend(sources, "interleave", new_source="zero")
        return BatchDataset(dataset, 5, order_of, worker_config=config())

    first = loader_for(loader(source("o")))
    take(first, 10)
    new = source("n", weight={"step": {0: 1, 30: 0}})
    assert take(resumed(loader(source("o"), new), first), 9) == ["nnnnn"] * 9


# Workers draw independently -----------------------------------------------------------------------


def drawn_by_ranks(weights, *, ranks, batches, tokens):
    """Return int64 [batches, sources]: samples drawn by all ranks, one each per batch."""
    counts = np.zeros((batches, len(weights)), np.int64)
    for rank in range(ranks):
        of = config(rank=rank, world_size=ranks)
        sources = [source(f"{n}", weight=w, tokens=tokens, of=of) for n, w in enumerate(weights)]
        samples = take(loader_for(LeastConsumedDataset(sources, worker_config=of)), batches)
        counts[np.arange(batches), [int(sample.source) for sample in samples]] += 1
    return counts


@pytest.mark.parametrize("tokens", [pytest.param(1, marks=pytest.mark.nightly), 700])
def test_workers_do_not_draw_in_lockstep(tokens):
    """The bounds are five standard deviations of 64 independent draws per batch.

    Over a run, each worker is off by less than one sample.
    """
    weights, ranks, batches = np.array([1, 3, 6]), 64, 60
    counts = drawn_by_ranks(weights, ranks=ranks, batches=batches, tokens=tokens)
    due = ranks * weights / 10
    assert (np.abs(counts - due) <= 5 * np.sqrt(due * (1 - weights / 10))).all()
    assert (np.abs(counts.sum(0) - batches * due) <= ranks).all()


def test_draws_are_reproducible_per_worker_and_differ_between_workers():
    """Each of four equal sources is drawn first by some of 16 workers."""
    one, again = (drawn_by_ranks([1] * 4, ranks=16, batches=9, tokens=3) for _ in range(2))
    assert (one == again).all()
    assert (one[0] > 0).all()
