# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Batches that travel through slots arrive as they were sent, whatever happens to the slots."""

import pickle
import time

import pytest

from energon_ext import PackedTaskEncoder, get_train_dataset
from energon_ext.batch import slots as batch_slots
from energon_ext.batch.slots import SLOTS_PER_WORKER, BatchSlots
from energon_ext.encoders.tokenizers import ByteTokenizer
from tests.support import batch_hash, config, loader_for, take, write_mix, write_tokens

BATCHES = 24


@pytest.fixture(scope="module")
def mix(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write_tokens(folder / "tokens", [list(range(4, 8 + number % 50)) for number in range(200)])
    return write_mix(folder / "mix.yaml", [("tokens", 1)])


def new_dataset(mix, num_workers=2):
    return get_train_dataset(
        mix,
        worker_config=config(num_workers),
        batch_size=2,
        task_encoder=PackedTaskEncoder(ByteTokenizer(), 32),
    )


def hashes(loader, count=BATCHES):
    return [batch_hash(batch) for batch in take(loader, count)]


@pytest.fixture
def arrivals(monkeypatch):
    """The slots that the main process has emptied, in order."""
    slots = []
    take_out = BatchSlots.take

    def take_out_and_tell(self, slot, num_bytes):
        slots.append(slot)
        return take_out(self, slot, num_bytes)

    monkeypatch.setattr(BatchSlots, "take", take_out_and_tell)
    return slots


@pytest.fixture
def expected(mix, monkeypatch):
    """Hashes of the batches as PyTorch hands them over: no batch fits into a slot."""
    with monkeypatch.context() as patch:
        patch.setattr(batch_slots, "SLOT_BYTES", 64)
        return hashes(loader_for(new_dataset(mix)))


def test_all_batches_arrive_unchanged_and_through_slots(mix, expected, arrivals):
    assert arrivals == []
    assert hashes(loader_for(new_dataset(mix))) == expected  # all are held until the end
    assert len(arrivals) >= BATCHES
    of_second_worker = [slot for slot in arrivals if slot >= SLOTS_PER_WORKER]
    assert len(of_second_worker) >= BATCHES // 2 - 1


def test_workers_that_run_out_of_slots_send_the_rest_in_another_way(mix, expected, arrivals):
    loader = loader_for(new_dataset(mix), prefetch_factor=8)
    iterator = iter(loader)
    batches = [next(iterator)]
    time.sleep(0.5)  # both workers are eight batches ahead now, and have four slots
    batches += [next(iterator) for _ in range(BATCHES - 1)]
    assert [batch_hash(batch) for batch in batches] == expected
    assert SLOTS_PER_WORKER <= len(arrivals) < BATCHES


def test_two_loaders_of_one_dataset_do_not_meet_in_a_slot(mix, expected, arrivals):
    dataset = new_dataset(mix)
    first, second = iter(loader_for(dataset)), iter(loader_for(dataset))
    pairs = [(batch_hash(next(first)), batch_hash(next(second))) for _ in range(BATCHES)]
    assert pairs == list(zip(expected, expected))
    assert len(arrivals) <= BATCHES + 2 * SLOTS_PER_WORKER  # of the one that came first


def test_without_workers_nothing_is_mapped_and_a_batch_is_pickled_as_ever(mix):
    batch = take(loader_for(new_dataset(mix, num_workers=0)), 1)[0]
    assert batch.slots is None
    assert batch_hash(pickle.loads(pickle.dumps(batch))) == batch_hash(batch)


def test_slots_that_are_sent_to_a_process_that_shares_nothing_are_empty_there():
    assert pickle.loads(pickle.dumps(BatchSlots(2))).put(None) is None
