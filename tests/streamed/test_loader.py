# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The loader of streamed datasets: states it refuses before a worker starts, and its end."""

import json
import multiprocessing
import time
from threading import Timer

import pytest
from megatron.energon import get_savable_loader
from megatron.energon.wrappers.batch_dataset import BatchDataset
from megatron.energon.wrappers.shuffle_buffer_dataset import ShuffleBufferDataset

from energon_ext import ConfigError, ExactDataLoader, StateMismatchError
from energon_ext.errors import StateFormatError, WorkerError
from energon_ext.loader.planned_dataset import PlannedDataset
from energon_ext.loader.reader import BatchReader
from energon_ext.loader.streamed import StreamedLoader, open_loader
from energon_ext.mixture.tree import blend_of
from energon_ext.plan.clock import Clock
from energon_ext.plan.run import Run
from energon_ext.plan.topology import Topology
from energon_ext.state.schema import seal
from energon_ext.weights import ConstantWeight, ScheduleAxis
from tests.plan.memory_documents import planned_source
from tests.state.mutations import mutations
from tests.streamed.numbers import blend, order_of, source
from tests.support import config, loader_for, take


def dataset(keys="ab", *, of=None, batch=2, shuffle=0, count=50, **fingerprint):
    of = config(**(of or {}))
    clock = Clock(ScheduleAxis(), Topology.of(of, batch, None))
    sources = [source(key, count, of=of) for key in keys]
    drawn = blend(sources, of=of, clock=clock, fingerprint=fingerprint)
    if shuffle:
        drawn = ShuffleBufferDataset(drawn, shuffle, worker_config=of)
    return BatchDataset(drawn, batch, order_of, worker_config=of)


def state_of(**options):
    loader = loader_for(dataset(**options))
    take(loader, 4)
    state = json.loads(json.dumps(loader.state_dict()))
    loader.close()
    return state


def refused(state, **options):
    """Return the error with which a loader refuses a state, and check that nothing has begun."""
    loader = loader_for(dataset(**options))
    with pytest.raises((StateMismatchError, StateFormatError)) as error:
        loader.load_state_dict(state)
    assert multiprocessing.active_children() == []
    assert "\n" not in str(error.value)
    assert (loader.batches_drawn, loader.changes) == (0, [])
    if loader.worker_config.num_workers == 0:
        assert take(loader, 3) == take(loader_for(dataset(**options)), 3)
    return error.value


TWO_RANKS = {"world_size": 2, "rank": 1}


@pytest.mark.parametrize(
    ("saved", "now", "differences"),
    [
        ({}, {"of": TWO_RANKS}, {"ranks": (1, 2)}),
        ({"of": {"world_size": 4, "rank": 1}}, {"of": TWO_RANKS}, {"ranks": (4, 2)}),
        ({}, {"of": {"num_workers": 1}}, {"workers": (0, 1)}),
        ({"of": {"num_workers": 1}}, {}, {"workers": (1, 0)}),
        ({"of": {"num_workers": 1}}, {"of": {"num_workers": 2}}, {"workers": (1, 2)}),
        ({}, {"batch": 1}, {"batch_size": (2, 1)}),
        ({"of": {"world_size": 2}}, {"of": TWO_RANKS}, {"rank": (0, 1)}),
        ({"of": {"seed": 3}}, {"of": {"seed": 4}}, {"seed": (3, 4)}),
        ({}, {"count": 51}, {"a: count": (50, 51)}),
        ({"image_size": 224}, {"image_size": 336}, {"image_size": (224, 336)}),
        ({"image_size": 224}, {}, {"image_size": (224, None)}),
        (
            {},
            {"shuffle": 8},
            {
                "stages": (
                    ["WatchdogDataset", "BatchDataset"],
                    ["WatchdogDataset", "BatchDataset", "ShuffleBufferDataset"],
                )
            },
        ),
    ],
)
def test_a_state_of_another_configuration_is_refused_with_the_fields(saved, now, differences):
    error = refused(state_of(**saved), **now)
    assert error.differences == differences


@pytest.mark.parametrize("workers", [0, 1])
def test_a_source_with_buffered_samples_cannot_leave(workers):
    options = {"of": {"num_workers": workers}, "shuffle": 8}
    loader = loader_for(dataset("b", **options))
    loader.load_state_dict(state_of(**options))
    message = "buffered sample of source.*'a'.*set `weight: 0` until they have been drawn."
    with pytest.raises(StateMismatchError, match=message):
        take(loader, 1)


def test_a_state_with_anything_changed_is_refused():
    for _, mutated in mutations(state_of(), 60, seed=0):
        assert isinstance(refused(mutated), StateFormatError)


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"version": 2}, StateFormatError, "version 2 was found, only 1 is"),
        ({"drawn": -1}, StateFormatError, "state.drawn: -1 found"),
        ({"topology": 7}, StateFormatError, "state.topology: 7 found"),
        ({"__class__": "Other"}, StateMismatchError, "dataset: saved 'Other'"),
    ],
)
def test_an_invalid_state_is_refused(change, kind, message):
    content = {key: value for key, value in state_of().items() if key != "energon_ext_digest"}
    error = refused(seal({**content, **change}))
    assert isinstance(error, kind)
    assert message in str(error)
    assert isinstance(refused(None), StateFormatError)


def test_energons_loader_refuses_a_damaged_blend_state_too():
    def loader():
        return get_savable_loader(dataset(), watchdog_timeout_seconds=None)

    first = loader()
    take(first, 3)
    state = first.save_state_rank()
    inner = state.worker_states[0]
    while inner["__class__"] != "EnergonExtBlend":
        inner = inner["datasets"][0]
    for changed, message in (
        ({"drawn": None}, "state.drawn: None found"),
        ({"sources": {"a": {}}}, "state.sources.a"),
        ({"version": 9}, "version 9"),
    ):
        before = dict(inner)
        inner.update(changed)
        with pytest.raises(StateFormatError, match=message):
            loader().restore_state_rank(state)
        inner.update(before)


def planned_loader():
    sources = [planned_source("a", [16] * 40)]
    tree, clock = blend_of({"a": ConstantWeight(1.0)}), Clock(ScheduleAxis(), Topology(1), 16)
    batches = BatchReader([sources[0].reader], lambda rows, described: rows, None)
    run = Run(sources, tree=tree, clock=clock)
    return ExactDataLoader(PlannedDataset(run, batches, worker_config=config()))


def test_planned_and_streamed_states_refuse_each_other():
    loader = planned_loader()
    take(loader, 2)
    error = refused(loader.state_dict())
    assert error.differences == {"dataset": ("EnergonExtPlan", "EnergonExtStreamed")}
    assert "Finish that run with its original setup, or start a new one." in str(error)
    with pytest.raises(StateMismatchError, match="EnergonExtStreamed.*now 'EnergonExtPlan'"):
        planned_loader().load_state_dict(state_of())


def test_a_state_is_restored_once_and_before_the_first_batch():
    state = state_of()
    loader = loader_for(dataset())
    loader.load_state_dict(state)
    for _ in range(2):
        with pytest.raises(ConfigError, match="before the first batch, in a new loader"):
            loader.load_state_dict(state)
        take(loader, 1)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_closed_loader_has_no_processes_and_refuses_batches(workers):
    loader = loader_for(dataset(of={"num_workers": workers}))
    iterator = iter(loader)
    next(iterator)
    mark = loader.mark()
    assert len(multiprocessing.active_children()) == workers
    loader.close()
    loader.close()
    assert multiprocessing.active_children() == []
    assert loader.state_dict(mark) == mark
    for use in (
        lambda: next(iterator),
        lambda: next(iter(loader)),
        loader.state_dict,
        lambda: loader.load_state_dict({}),
    ):
        with pytest.raises(ConfigError, match="closed; create a new one and load the state"):
            use()


@pytest.mark.parametrize("is_waiting", [False, True])
def test_a_killed_worker_is_named(is_waiting):
    loader = loader_for(dataset(of={"num_workers": 1}))
    take(loader, 1)
    (worker,) = multiprocessing.active_children()
    if is_waiting:
        Timer(0.5, worker.kill).start()
    else:
        worker.kill()
    with pytest.raises(WorkerError, match=f"^A data worker died: .*pid.*{worker.pid}.* It may "):
        for _ in loader if is_waiting else range(20):
            time.sleep(0 if is_waiting else 0.5)


def test_open_loader_picks_the_loader_for_a_dataset():
    assert isinstance(open_loader(dataset()), StreamedLoader)
    with pytest.raises(ConfigError, match="streamed sources found.*get_savable_loader"):
        ExactDataLoader(dataset())


@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_of_none_is_an_error_and_not_the_end(workers):
    of = config(workers)
    batches = BatchDataset(
        blend([source("a", 50, of=of)], of=of),
        2,
        lambda samples: None if "a7" in str(samples) else samples,
        worker_config=of,
    )
    with pytest.raises(ConfigError, match="encode_batch returned None; return every batch"):
        list(loader_for(batches))
