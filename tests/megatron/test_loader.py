# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The endless loader and its state."""

import pytest

from energon_ext import ConfigError, PackedTaskEncoder, get_train_dataset
from energon_ext.errors import StateFormatError
from energon_ext.megatron import MegatronEnergonLoader
from energon_ext.tokenizers.tokenizers import ByteTokenizer
from tests import support

TEXTS = ["one fish two fish", "red fish", "blue fish, black fish, old fish", "new fish"] * 10


@pytest.fixture(scope="module")
def mix(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mix")
    for name, change in (("a", str.lower), ("b", str.upper)):
        documents = [ByteTokenizer().encode(change(text)) for text in TEXTS]
        support.write_tokens(folder / name, documents)
    schedule = {"step": {0: 3, 5: 1}}
    return support.write_mix(folder / "mix.yaml", [("./a", schedule), ("./b", 1)])


def make_loader(mix, num_workers=0, **options):
    dataset = get_train_dataset(
        mix,
        worker_config=support.config(num_workers),
        batch_size=2,
        task_encoder=PackedTaskEncoder(ByteTokenizer(), 32, packing_buffer_docs=8),
        **options,
    )
    loader = MegatronEnergonLoader(dataset)
    support._open_loaders.append(loader)
    return loader


def hashes(loader, count):
    return [support.batch_hash(next(loader)) for _ in range(count)]


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.nightly)])
def test_a_restored_loader_continues_with_the_next_batch(mix, num_workers):
    straight = hashes(make_loader(mix, num_workers), 12)
    first = make_loader(mix, num_workers)
    assert iter(first) is first
    assert hashes(first, 5) == straight[:5]
    state = first.save_state()
    assert hashes(first, 2) == straight[5:7]

    for _ in range(2):  # one state can be restored more than once
        second = make_loader(mix, num_workers)
        second.restore_state(state)
        assert second.next_batch_index == 5
        assert hashes(second, 3) == straight[5:8]
    assert second.next_batch_index == 8
    third = make_loader(mix, num_workers)
    third.restore_state_rank(second.save_state_rank())  # the names of Energon's loader
    assert hashes(third, 4) == straight[8:12]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_state_saved_before_the_first_batch_starts_there(mix, num_workers):
    state = make_loader(mix, num_workers).save_state()
    restored = make_loader(mix, num_workers)
    restored.restore_state(state)
    assert restored.next_batch_index == 0
    assert hashes(restored, 2) == hashes(make_loader(mix, num_workers), 2)


def test_epochs_follow_each_other(mix):
    loader = make_loader(mix, virtual_epoch_length=3)
    straight = hashes(make_loader(mix), 7)
    assert hashes(loader, 7) == straight
    assert loader.next_batch_index == 7


def test_a_rank_without_batches_is_an_error(mix, monkeypatch):
    loader = make_loader(mix)
    monkeypatch.setattr(loader, "loader", FakeLoader([]))
    with pytest.raises(ConfigError, match="no batch for data-parallel rank 0 of 1"):
        next(loader)


class FakeLoader(list):
    worker_config = support.config()
    batches_drawn = 0


def test_anything_but_a_state_is_refused(mix):
    with pytest.raises(StateFormatError, match="differs from the saved one"):
        make_loader(mix).restore_state({"step": 3})


def test_a_state_continues_on_another_number_of_workers(mix):
    loader = make_loader(mix)
    next(loader)
    moved = make_loader(mix, num_workers=2)
    moved.restore_state(loader.save_state())
    assert hashes(moved, 3) == hashes(loader, 3)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loader_that_has_started_cannot_be_restored(mix, num_workers):
    loader = make_loader(mix, num_workers)
    next(loader)
    with pytest.raises(ConfigError, match="before the first batch"):
        loader.restore_state(loader.save_state())


def test_without_workers_planned_through_is_the_step_of_the_next_batch(mix):
    loader = make_loader(mix)
    steps = []
    for _ in range(3):
        steps.append(loader.planned_through)
        next(loader)
    assert steps == [0, 1, 2]
