# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Least consumed first: the chooser, and interleaves in YAML over real loaders."""

import json
from collections import Counter

import numpy as np
import pytest
from energon_ext.mixture.choosers import LeastConsumedChooser, RandomChooser, chooser_for
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.energon import DefaultTaskEncoder

from energon_ext import ConfigError, DynamicBlendMixin, PackedTaskEncoder, get_train_dataset
from energon_ext.encoders.tokenizers import ByteTokenizer
from energon_ext.plan.lookup import find_blend
from energon_ext.weights import (
    ConstantWeight,
    WeightGroup,
    compose_weights,
    weight_from_config,
)
from tests.support import batch_hash, close_loaders, config, loader_for, take, write_dataset


def run(chooser, samples, batch_index=0):
    """Read ``samples`` (key -> lengths) to their end; the order of the keys."""
    order, left = [], {key: list(lengths) for key, lengths in samples.items()}
    while chooser.active_keys:
        key = chooser.choose(batch_index)
        if left[key]:
            chooser.consume(key, left[key].pop(0))
            order.append(key)
        else:
            chooser.drop(key)
    return order


def test_the_source_with_the_fewest_tokens_is_next():
    chooser = LeastConsumedChooser(["a", "b"], counts={"a": 0, "b": 100})
    assert run(chooser, {"a": [2] * 3, "b": [2] * 3}) == ["a", "a", "a", "b", "b", "b"]
    assert chooser.counts == {"a": 6, "b": 106}


def test_sources_of_different_lengths_stay_within_one_sample():
    chooser = LeastConsumedChooser(["one", "three", "ten"])
    lengths = {"one": 1, "three": 3, "ten": 10}
    while sum(chooser.counts.values()) < 2500:
        key = chooser.choose()
        chooser.consume(key, lengths[key])
        assert max(chooser.counts.values()) - min(chooser.counts.values()) <= 10


def test_a_new_source_starts_level_or_at_zero():
    state = LeastConsumedChooser(["old"], counts={"old": 120}).save_state()
    for new_source, expected in (("baseline", 120), ("zero", 0)):
        resumed = LeastConsumedChooser(["old", "new"], new_source=new_source)
        resumed.restore_state(state)
        assert resumed.counts == {"old": 120, "new": expected}
        begun = LeastConsumedChooser(["old", "new"], counts={"old": 120}, new_source=new_source)
        assert begun.counts == {"old": 120, "new": expected}
    with pytest.raises(ConfigError, match="new_source: 'later'"):
        LeastConsumedChooser(["a"], new_source="later")


lengths = st.lists(st.integers(1, 100_000), min_size=1, max_size=5)


@settings(max_examples=60)
@given(
    st.lists(st.tuples(lengths, st.floats(0.01, 100)), min_size=2, max_size=6), st.integers(0, 99)
)
def test_the_bound_holds_at_every_draw(sources, seed):
    """|tokens_i / w_i - tokens_j / w_j| <= longest_i / w_i + longest_j / w_j, over any window:
    with T(k) = tokens / w after k draws, T_i - T_j may range over no more than that."""
    keys = [f"s{number}" for number in range(len(sources))]
    weights = dict(zip(keys, (weight for _, weight in sources)))
    chooser = LeastConsumedChooser(keys, list(weights.values()), seed=seed)
    history = []
    for draw in range(200):
        history.append([chooser.counts[key] / weights[key] for key in keys])
        key = chooser.choose(draw // 7)
        sample_lengths = sources[keys.index(key)][0]
        chooser.consume(key, sample_lengths[draw % len(sample_lengths)])
    clocks = np.array(history)
    longest = np.array([max(sample_lengths) / weight for sample_lengths, weight in sources])
    for i in range(len(keys)):
        for j in range(i):
            difference = clocks[:, i] - clocks[:, j]
            assert np.ptp(difference) <= (longest[i] + longest[j]) * (1 + 1e-9)


def test_shares_follow_a_schedule_as_it_moves_and_nobody_starves_after_a_change():
    weights = {"a": {"linear": {0: 1, 1000: 9}}, "b": {"step": {0: 5, 400: 0, 600: 5}}, "c": 2}
    specs = {key: weight_from_config(value) for key, value in weights.items()}
    chooser = LeastConsumedChooser(list(specs), list(specs.values()))
    generator = np.random.default_rng(0)
    target = dict.fromkeys(specs, 0.0)
    consumed, last_seen = Counter(), dict.fromkeys(specs, 0)
    longest = 50
    for index in range(1000):
        total = sum(spec.evaluate(index) for spec in specs.values())
        drawn = 0
        for _ in range(20):
            key = chooser.choose(index)
            tokens = int(generator.integers(1, longest + 1))
            chooser.consume(key, tokens)
            consumed[key] += tokens
            drawn += tokens
            last_seen[key] = index
        for key, spec in specs.items():
            target[key] += drawn * spec.evaluate(index) / total
            # Each change of the active sources may cost one more sample.
            changes = (index >= 400) + (index >= 600)
            assert abs(consumed[key] - target[key]) <= (2 + 2 * changes) * longest
            if spec.evaluate(index) > 0 and index not in (600,):
                assert index - last_seen[key] <= 10
        if 400 <= index < 600:
            assert last_seen["b"] < 400


@pytest.mark.parametrize("sample_tokens", [0, 3])
def test_a_state_continues_at_every_draw_through_json(sample_tokens):
    def chooser():
        specs = [
            {"linear": {0: 1, 90: 9}},
            {"step": {0: 1, 30: 0, 60: 1}},
            {"linear": {0: 9, 90: 1}},
        ]
        weights = [weight_from_config(spec) for spec in specs]
        return LeastConsumedChooser(list("abc"), weights, sample_tokens=sample_tokens)

    def read(chooser, first):
        order = []
        for draw in range(first, 300):
            order.append(chooser.choose(draw // 3))
            chooser.consume(order[-1], 1 + draw % 5)
        return order

    expected = read(chooser(), 0)
    straight = chooser()
    for draw in range(0, 300):
        if draw % 7 == 0:
            resumed = chooser()
            resumed.restore_state(json.loads(json.dumps(straight.save_state())))
            assert read(resumed, draw) == expected[draw:]
        straight.choose(draw // 3)
        straight.consume(expected[draw], 1 + draw % 5)


def test_ties_are_broken_at_random_by_the_seed():
    def first_of_each_round(seed):
        chooser, firsts = LeastConsumedChooser(["a", "b"], seed=seed), []
        for draw in range(800):
            key = chooser.choose()
            chooser.consume(key, 7)
            firsts += [key] if draw % 2 == 0 else []
        return firsts

    firsts = first_of_each_round(seed=1)
    assert firsts == first_of_each_round(seed=1) != first_of_each_round(seed=2)
    # 400 fair coins: 200 +- 10.
    assert abs(firsts.count("a") - 200) < 50


def test_half_a_sample_ahead_is_measured_at_the_weight_of_the_last_draw():
    """An independent count of clocks: where weights move, the half sample moves with them."""
    specs = {"a": {"linear": {0: 1, 300: 9}}, "b": {"linear": {0: 9, 300: 1}}, "c": 2}
    weights = {key: weight_from_config(spec) for key, spec in specs.items()}
    chooser = LeastConsumedChooser(list(weights), list(weights.values()), sample_tokens=30)
    clocks = dict.fromkeys(weights, 0.0)
    ahead = {key: 15 / weights[key].evaluate(0) for key in weights}
    for draw in range(900):
        key, tokens = chooser.choose(draw // 3), 25 + draw % 11
        assert ahead[key] == pytest.approx(min(ahead.values()), rel=1e-12)
        chooser.consume(key, tokens)
        weight = weights[key].evaluate(draw // 3)
        clocks[key] += tokens / weight
        ahead[key] = clocks[key] + 15 / weight


def test_half_a_sample_ahead_is_no_part_of_what_was_consumed():
    state = LeastConsumedChooser(
        ["a", "b"], [1, 0.5], sample_tokens=10, counts={"a": 100, "b": 50}
    ).save_state()
    assert state["clocks"] == {"a": 100, "b": 100}
    resumed = LeastConsumedChooser(["a", "b", "c"], [1, 0.5, 1], sample_tokens=10)
    resumed.restore_state(state)
    assert resumed.counts == {"a": 100, "b": 50, "c": 100}


def test_a_weight_that_was_changed_before_a_resume_holds_from_the_next_draw_on():
    """Clocks 100 and 103; half a sample ahead 105 and 108, with a weight of 100 for b 103.05."""
    counts = {"a": 100, "b": 103}
    before = LeastConsumedChooser(["a", "b"], sample_tokens=10, counts=counts)
    assert before.choose() == "a"
    after = LeastConsumedChooser(["a", "b"], [1, 100], sample_tokens=10)
    after.restore_state(before.save_state())
    assert after.choose() == "b"
    assert after.counts == counts


@pytest.mark.parametrize("returning", [["b"], None])
def test_a_source_that_returns_stands_level_with_the_source_furthest_behind(returning):
    chooser = LeastConsumedChooser(["a", "b", "c"], counts={"a": 500, "b": 20, "c": 700})
    chooser.drop("b")
    chooser.revive(returning)
    state = chooser.save_state()
    assert state["clocks"] == {"a": 500, "b": 500, "c": 700}
    assert chooser.counts == {"a": 500, "b": 20, "c": 700}
    assert sorted(state["turns"]) == ["a", "b", "c"]


def test_equal_samples_never_deviate_by_more_than_one_where_random_draws_drift():
    keys = list("abcdefghij")
    weights = [1 + number for number in range(10)]
    shares = np.array(weights) / sum(weights)
    worst = {}
    choosers = (LeastConsumedChooser(keys, weights, sample_tokens=1), RandomChooser(keys, weights))
    for chooser in choosers:
        counts, deviation = np.zeros(10), 0.0
        for draw in range(1, 20_001):
            key = chooser.choose()
            chooser.consume(key, 1)
            counts[keys.index(key)] += 1
            deviation = max(deviation, np.abs(counts - shares * draw).max())
        worst[type(chooser).__name__] = deviation
    assert worst["LeastConsumedChooser"] <= 1.2
    assert worst["RandomChooser"] > 20


def test_nodes_inside_nodes_take_turns_by_their_own_rules():
    """blend(1: interleave(a, b weight 3), 1: blend(c, d)): probabilities outside, exact inside."""
    pair = WeightGroup([ConstantWeight(1), ConstantWeight(3)], rule="interleave")
    inner = WeightGroup([ConstantWeight(1), ConstantWeight(1)])
    outer = WeightGroup([ConstantWeight(1), ConstantWeight(1)])
    weights = [
        compose_weights(outer.share(0), pair.share(0)),
        compose_weights(outer.share(0), pair.share(1)),
        compose_weights(outer.share(1), inner.share(0)),
        compose_weights(outer.share(1), inner.share(1)),
    ]
    chooser = chooser_for(list("abcd"), weights, seed=3)
    counts = Counter()
    for _ in range(4000):
        key = chooser.choose()
        chooser.consume(key, 10)
        counts[key] += 1
        assert abs(3 * counts["a"] - counts["b"]) <= 4
    assert abs(counts["a"] + counts["b"] - 2000) < 5 * 32
    assert abs(counts["c"] - counts["d"]) < 5 * 45
    resumed = chooser_for(list("abcd"), weights, seed=3)
    resumed.restore_state(json.loads(json.dumps(chooser.save_state())))
    following = []
    for one in (chooser, resumed):
        order = []
        for _ in range(50):
            order.append(one.choose())
            one.consume(order[-1], 10)
        following.append(order)
    assert following[0] == following[1]
    for key in "ab":
        chooser.drop(key)
    assert {chooser.choose() for _ in range(60)} == {"c", "d"}


# Over real loaders -----------------------------------------------------------------------------


class Encoder(DynamicBlendMixin, DefaultTaskEncoder):
    """Nothing but the mixin."""


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    root = tmp_path_factory.mktemp("data")
    for source, count, length in (("short", 400, 8), ("long", 80, 80), ("other", 100, 30)):
        texts = [f"{source}{n:03d}".ljust(length, ".") for n in range(count)]
        write_dataset(root / source, texts)
    return root


def write(path, split):
    content = {"__module__": "energon_ext", "__class__": "ScheduledMetadataset"}
    path.write_text(json.dumps({**content, "splits": {"train": split}}))
    return path


def build(path, *, num_workers=0, **options):
    encoder = PackedTaskEncoder(ByteTokenizer(), 32, **{"packing_buffer_docs": 8, **options})
    return get_train_dataset(
        path, worker_config=config(num_workers), batch_size=4, task_encoder=encoder
    )


@pytest.mark.parametrize("num_workers", [0, 2])
def test_token_shares_are_exact_where_documents_differ_ten_times_in_length(data, num_workers):
    path = write(
        data / "interleave.yaml",
        {"interleave": [{"path": "short"}, {"path": "long", "weight": 2}]},
    )
    tokens = Counter()
    for batch in take(loader_for(build(path, num_workers=num_workers)), 60):
        tokens.update(batch.tokens_per_source())
        if sum(tokens.values()) > 2000:
            # One row of each worker.
            slack = 3 * 32 * max(1, num_workers)
            assert abs(2 * tokens["short:train"] - tokens["long:train"]) <= slack


def test_a_run_continues_bit_by_bit(data):
    path = write(
        data / "nested.yaml",
        {
            "blend": [
                {"path": "interleave.yaml", "weight": {"linear": {0: 3, 20: 1}}},
                {"path": "other", "weight": 1},
            ]
        },
    )
    write(data / "interleave.yaml", {"interleave": [{"path": "short"}, {"path": "long"}]})
    expected = [batch_hash(batch) for batch in take(loader_for(build(path)), 24)]
    state, position = None, 0
    for save_point in (3, 4, 17, 24):
        loader = loader_for(build(path))
        loader.restore_state_rank(state)
        found = [batch_hash(batch) for batch in take(loader, save_point - position)]
        assert found == expected[position:save_point]
        state, position = loader.save_state_rank(), save_point
        close_loaders()


def test_planned_shares_of_nested_nodes_are_products(data):
    write(
        data / "interleave.yaml", {"interleave": [{"path": "short"}, {"path": "long", "weight": 3}]}
    )
    path = write(
        data / "nested.yaml",
        {"blend": [{"path": "interleave.yaml", "weight": 2}, {"path": "other", "weight": 2}]},
    )
    assert find_blend(build(path)).planned_shares(0) == pytest.approx(
        {"short:train": 0.125, "long:train": 0.375, "other:train": 0.5}
    )


def test_a_source_that_ends_leaves_and_the_others_go_on(data):
    path = write(data / "ending.yaml", {"interleave": [{"path": "short"}, {"path": "long"}]})
    dataset = get_train_dataset(
        path, worker_config=config(), batch_size=5, task_encoder=Encoder(), repeat=False
    )
    texts = [text for batch in loader_for(dataset) for text in batch.text]
    assert len(texts) == len(set(texts)) == 480
    assert Counter(text[0] for text in texts[:160]) == {"s": 80, "l": 80}


def test_from_blend_to_interleave_every_source_continues_where_it_was(data, caplog):
    entries = [{"path": "short"}, {"path": "long"}]
    blend = write(data / "as_blend.yaml", {"blend": entries})
    interleave = write(data / "as_interleave.yaml", {"interleave": entries})

    def loader(path):
        return loader_for(
            get_train_dataset(path, worker_config=config(), batch_size=4, task_encoder=Encoder())
        )

    first = loader(blend)
    seen = [text for batch in take(first, 15) for text in batch.text]
    second = loader(interleave)
    second.restore_state_rank(first.save_state_rank())
    seen += [text for batch in take(second, 15) for text in batch.text]
    assert len(set(seen)) == len(seen)
    assert "order of choice begins anew" in caplog.text


def test_an_encoder_without_the_mixin_refuses_an_interleave(data):
    class Plain(DefaultTaskEncoder):
        """No mixin."""

    path = write(data / "plain.yaml", {"interleave": [{"path": "short"}, {"path": "long"}]})
    with pytest.raises(ConfigError, match="interleave.*DynamicBlendMixin"):
        get_train_dataset(path, worker_config=config(), batch_size=4, task_encoder=Plain())


@pytest.mark.parametrize(
    ("split", "message"),
    [
        ({"interleave": []}, "an empty `interleave`"),
        ({"interleave": [{"path": "short"}], "new_source": "soon"}, "new_source: 'soon'"),
        ({"interleave": [{"path": "short", "weight": -1}]}, r"interleave\[0\] \(short\).weight"),
    ],
)
def test_a_wrong_interleave_is_named_with_its_place(data, split, message):
    with pytest.raises(ConfigError, match=message):
        build(write(data / "wrong.yaml", split))
