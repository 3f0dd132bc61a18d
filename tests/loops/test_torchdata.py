# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""torchdata's loader saves and restores our objects, and reads nothing again."""

import pytest

from energon_ext import ConfigError
from energon_ext.loader.plan_sampler import PlanSampler
from energon_ext.loader.reader import BatchReader
from tests.loops.records import ROWS, STEP, RecordRows, offline, record_dataset, write_sums

stateful_dataloader = pytest.importorskip("torchdata.stateful_dataloader")


def new_loader(dataset, batch_size, **options):
    return stateful_dataloader.StatefulDataLoader(dataset, batch_size, collate_fn=as_is, **options)


def as_is(items):
    return items


class Counted(RecordRows):
    """Notes which rows were read, in this process."""

    def __getitem__(self, number):
        vars(self).setdefault("read", []).append(number)
        return super().__getitem__(number)


@pytest.fixture
def mix(tmp_path):
    return write_sums(tmp_path)


def prompts(batches):
    return [record["prompt"] for batch in batches for record in batch]


def take(loader, count):
    """Return the first batches; the workers end with the loader's iterator."""
    batches = iter(loader)
    found = [next(batches) for _ in range(count)]
    return found, loader.state_dict()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("batch_size", [STEP, 3])  # of theirs; 3 is not a part of a step
def test_a_map_style_dataset_goes_on_after_any_batch(mix, workers, batch_size):
    rows = Counted(mix)
    begin, state = take(new_loader(rows, batch_size, num_workers=workers), 3)
    again = Counted(mix)
    rest = [*new_loader_at(state, again, batch_size, num_workers=workers)]
    assert prompts(begin) + prompts(rest) == offline(mix)
    if not workers:
        assert again.read == [*range(3 * batch_size, ROWS)]  # nothing twice


def new_loader_at(state, dataset, batch_size, **options):
    loader = new_loader(dataset, batch_size, **options)
    loader.load_state_dict(state)
    return loader


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loop_that_shuffles_goes_on_with_the_rows_that_it_has_not_read(mix, workers):
    begin, state = take(new_loader(RecordRows(mix), 4, shuffle=True, num_workers=workers), 3)
    rest = [*new_loader_at(state, RecordRows(mix), 4, shuffle=True, num_workers=workers)]
    assert sorted(prompts(begin) + prompts(rest)) == sorted(offline(mix))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_planned_dataset_goes_on_as_an_iterable_one(mix, workers, monkeypatch):
    """Its batches are our own; each worker reads those whose turn it is."""
    dataset = record_dataset(mix, 2, workers)
    begin, state = take(new_loader(dataset, None, num_workers=workers), 5)
    again = new_loader_at(state, record_dataset(mix, 2, workers), None, num_workers=workers)
    read, rows = BatchReader.read, []

    def count(reader, batch):
        rows.append(batch)
        return read(reader, batch)

    monkeypatch.setattr(BatchReader, "read", count)
    rest, _ = take(again, 8)
    if not workers:
        assert len(rows) == 8  # nothing twice
    assert prompts(begin + rest) == offline(mix)[:26]


def test_other_workers_than_those_of_the_configuration_are_refused(mix):
    with pytest.raises(ConfigError, match=r"num_workers: the loader has 2, but"):
        list(new_loader(record_dataset(mix, 2), None, num_workers=2))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sampler_goes_on_with_another_number_of_ranks(workers):
    """The workers have asked for batches ahead, which the state does not contain."""
    sources = ["a"] * 20 + ["b"] * 12
    weights = {"a": {"linear": {0: 1, 12: 4}}, "b": 2}

    def loaders(ranks, state=None):
        found = []
        for rank in range(ranks):
            sampler = PlanSampler(
                sources, weights, rows_per_step=8, samples=96, rank=rank, ranks=ranks
            )
            options = {"sampler": sampler, "num_workers": workers}
            found.append(new_loader(range(100, 132), 8 // ranks, **options))
            if state is not None:
                found[-1].load_state_dict(state)
        return found

    def in_order(batches):
        return [index for step in zip(*batches) for each in zip(*step) for index in each]

    taken = [take(loader, 5) for loader in loaders(2)]
    rest = [[*loader] for loader in loaders(4, taken[0][1])]
    found = in_order([batches for batches, _ in taken]) + in_order(rest)
    expected = PlanSampler(sources, weights, rows_per_step=8, samples=96)
    assert found == [100 + index for index in expected]
