# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Resumes: a source finds its state by key, whatever happens to the others."""

import json
import random

import pytest
from megatron.energon import SavableDataLoader
from megatron.energon.wrappers.batch_dataset import BatchDataset
from megatron.energon.wrappers.shuffle_buffer_dataset import ShuffleBufferDataset

from energon_ext.errors import StateMismatchError
from energon_ext.plan.clock import Clock
from energon_ext.plan.topology import Topology
from energon_ext.weights import ScheduleAxis
from tests.streamed.numbers import assert_nothing_lost, blend, drawn_of, order_of, resumed, source
from tests.support import config, loader_for, take

COUNTS = {"a": 7, "b": 1, "c": 40, "d": 1000}


def changes_of(loader):
    return {change.key: change.change for change in loader.changes}


# By key -------------------------------------------------------------------------------------------


def some_blend(chance, rank, ranks):
    """Return a random blend of some of the sources, in any order and with any weights."""
    of = config(rank=rank, world_size=ranks)
    keys = chance.sample(sorted(COUNTS), chance.randint(1, len(COUNTS)))
    weights = [1, 5, {"linear": {0: 1, 30: 9}}, {"step": {0: 0, 8: 3}}]
    sources = [
        source(key, COUNTS[key], weight=chance.choice(weights[: 2 if n == 0 else 4]), of=of)
        for n, key in enumerate(keys)
    ]
    return keys, blend(sources, chance.choice(["blend", "interleave"]), of)


@pytest.mark.parametrize("seed", range(12))
def test_every_source_continues_where_it_was_over_any_chain_of_changed_blends(seed):
    chance = random.Random(seed)
    ranks = chance.randint(1, 2)
    rank, loader, seen, known = chance.randrange(ranks), None, [], set()
    for _ in range(8):
        keys, dataset = some_blend(chance, rank, ranks)
        loader = loader_for(dataset) if loader is None else resumed(dataset, loader)
        if known:
            expected = {key: "kept" if key in known else "new" for key in keys}
            expected |= dict.fromkeys(known - set(keys), "retained")
            assert changes_of(loader) == expected
        known |= set(keys)
        seen += take(loader, chance.randint(1, 30))
        read = assert_nothing_lost(seen, COUNTS)
        assert {k: n for k, (n, _) in drawn_of(loader).items()} == {k: read[k] for k in known}


def test_a_moved_source_continues_under_its_new_key():
    first = loader_for(blend([source("web", names=("/d/web", "web")), source("b")]))
    seen = take(first, 20)
    moved = resumed(blend([source("../web", names=("/d/web", "web")), source("b")]), first)
    assert changes_of(moved) == {"../web": "moved", "b": "kept"}
    later = take(moved, 20)
    for keys in ({"web", "../web"}, {"b"}):
        numbers = [sample.number for sample in seen + later if sample.source in keys]
        assert numbers == list(range(1, len(numbers) + 1))


# Every batch --------------------------------------------------------------------------------------


def batched(rule="interleave", *, workers=0, shuffle=0, epochs=None, keys="abc", rank=0, ranks=1):
    of = config(workers, rank, ranks)
    weights = {"a": {"linear": {0: 3, 20: 1}}, "b": 1, "c": {"step": {0: 1, 9: 0, 15: 2}}}
    sources = [
        source(k, COUNTS[k], tokens=3 + n, weight=weights[k], epochs=epochs and epochs[k], of=of)
        for n, k in enumerate(keys)
    ]
    drawn = blend(sources, rule, of)
    if shuffle:
        drawn = ShuffleBufferDataset(drawn, shuffle, worker_config=of)
    return BatchDataset(drawn, 3, [].__class__, worker_config=of)


def content_of(batches):
    return [[(sample.source, sample.number) for sample in batch] for batch in batches]


@pytest.mark.parametrize("shuffle", [pytest.param(0, marks=pytest.mark.nightly), 8])
@pytest.mark.parametrize("rule", ["blend", "interleave"])
@pytest.mark.parametrize("epochs", [None, {"a": 2, "b": None, "c": 1}])
def test_resumes_are_exact_at_every_batch(rule, shuffle, epochs):
    reference = loader_for(batched(rule, shuffle=shuffle, epochs=epochs, ranks=2, rank=1))
    iterator, batches, states = iter(reference), [], []
    for _ in range(30):
        batches += content_of([next(iterator)])
        states.append(json.dumps(reference.state_dict()))
    for position, text in enumerate(states):
        loader = loader_for(batched(rule, shuffle=shuffle, epochs=epochs, ranks=2, rank=1))
        loader.load_state_dict(json.loads(text))
        assert json.loads(json.dumps(loader.state_dict())) == json.loads(text)
        assert loader.batches_drawn == position + 1
        assert content_of(take(loader, 29 - position)) == batches[position + 1 :]


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.nightly), 2])
@pytest.mark.parametrize("shuffle", [pytest.param(0, marks=pytest.mark.nightly), 8])
def test_a_resume_with_workers_is_exact_at_every_batch_and_over_several_saves(workers, shuffle):
    """Includes saves before every worker has begun, after the start and after a resume."""
    expected = content_of(take(loader_for(batched(workers=workers, shuffle=shuffle)), 14))
    loader = loader_for(batched(workers=workers, shuffle=shuffle))
    found = []
    for count in (1, 1, 2, 5, 5):
        found += content_of(take(loader, count))
        following = resumed(batched(workers=workers, shuffle=shuffle), loader)
        loader.close()
        loader = following
    assert found == expected


def test_a_state_from_before_the_first_batch_starts_at_the_beginning():
    loader = resumed(batched(), loader_for(batched()))
    assert content_of(take(loader, 9)) == content_of(take(loader_for(batched()), 9))


def test_draws_after_a_save_do_not_change_it():
    loader = loader_for(batched(shuffle=8))
    take(loader, 5)
    mark = loader.mark()
    expected = content_of(take(loader, 9))
    other = loader_for(batched(shuffle=8))
    other.load_state_dict(loader.state_dict(mark))
    assert content_of(take(other, 9)) == expected


# Ends ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1])
def test_a_blend_read_once_restarts_when_iterated_again(workers):
    of = config(workers)
    sources = [source(key, COUNTS[key], endless=False, of=of) for key in "abc"]
    loader = loader_for(blend(sources, of=of, restarts=True))
    epochs = [list(loader) for _ in range(3)]
    for samples in epochs:
        assert_nothing_lost(samples, COUNTS)
        assert len(samples) == 7 + 1 + 40
    assert order_of(epochs[0]) == order_of(epochs[1])


def test_a_repeating_blend_finishes_every_source_before_any_repeats():
    sources = [source(key, COUNTS[key], endless=False) for key in "abc"]
    samples = take(loader_for(blend(sources, repeats=True)), 5 * 48)
    for start in range(0, 5 * 48, 48):
        assert_nothing_lost(samples[start : start + 48], COUNTS)
        assert len(set(map(str, samples[start : start + 48]))) == 48


@pytest.mark.parametrize("rule", ["blend", "interleave"])
def test_an_ended_source_leaves_and_returns_with_a_raised_limit(rule, caplog):
    caplog.set_level("INFO", "energon_ext")

    def limited(epochs):
        return blend([source("a", 7, epochs=epochs), source("d", 1000)], rule)

    first = loader_for(limited(2))
    seen = take(first, 60)
    assert order_of(seen).count("a") == 14
    assert caplog.text.count("a: read to its end (max_epochs: 2).") == 1
    same = resumed(limited(2), first)
    seen += take(same, 30)
    assert order_of(seen).count("a") == 14
    raised = resumed(limited(3), same)
    seen += take(raised, 60)
    assert order_of(seen).count("a") == 21
    assert_nothing_lost(seen, COUNTS)


# Energon's own loader -----------------------------------------------------------------------------


def stock_loader(dataset, **options):
    return SavableDataLoader(
        dataset, watchdog_timeout_seconds=None, gc_collect_every_n_steps=0, **options
    )


def test_energons_loader_can_resume_repeatedly_from_one_state():
    """Stock datasets, in particular buffers, keep references into a state that they restore."""
    loader = stock_loader(batched())
    take(loader, 7)
    state = loader.save_state_rank()
    expected = content_of(take(loader, 9))
    for _ in range(2):
        other = stock_loader(batched())
        other.restore_state_rank(state)
        assert content_of(take(other, 9)) == expected


def test_restoring_a_started_run_begins_new_sources_at_their_start():
    loader = stock_loader(batched(keys="ab"))
    take(loader, 7)
    other = stock_loader(batched())
    assert any(source == "c" for batch in content_of(take(other, 7)) for source, _ in batch)
    other.restore_state_rank(loader.save_state_rank())
    later = [
        sample for batch in content_of(take(other, 40)) for sample in batch if sample[0] == "c"
    ]
    assert [number for _, number in later] == [n % 40 + 1 for n in range(len(later))]


def test_a_buffered_sample_is_reread_under_its_current_key():
    def dataset(key):
        sources = [source(key, names=("/d/web", "web")), source("b")]
        return ShuffleBufferDataset(blend(sources), 8, worker_config=config())

    first = stock_loader(dataset("web"))
    seen = take(first, 20)
    state = first.save_state_rank()
    for count in (1, 2, 60):  # while samples drawn before the move are buffered
        moved = stock_loader(dataset("../web"))
        moved.restore_state_rank(state)
        seen += take(moved, count)
        state = moved.save_state_rank()
    numbers = sorted(sample.number for sample in seen if sample.source != "b")
    assert numbers[:20] == list(range(1, 21))


def test_energons_loader_refuses_the_state_of_another_rank():
    loader, other = (stock_loader(batched(rank=rank, ranks=2)) for rank in range(2))
    take(loader, 3)
    with pytest.raises(StateMismatchError, match="rank: saved 0, now 1"):
        other.restore_state_rank(loader.save_state_rank())


@pytest.mark.parametrize("unit", ["steps", "samples"])
def test_a_changed_breakpoint_unit_is_logged(unit, caplog):
    def loader(counted):
        clock = Clock(ScheduleAxis(counted), Topology.of(config(), 1, None))
        return loader_for(blend([source("a")], clock=clock))

    first = loader("steps")
    take(first, 2)
    loader(unit).load_state_dict(first.state_dict())
    message = "schedule_axis: breakpoints counted steps; from here on they count samples."
    assert (message in caplog.messages) is (unit == "samples")
