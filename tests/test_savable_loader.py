# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The state of a loader around its start, where the stock one is not exact."""

import megatron.energon
import pytest

from energon_ext import ConfigError, PackedTaskEncoder, get_train_dataset
from energon_ext.encoders.tokenizers import ByteTokenizer
from energon_ext.state.loader import ExactDataLoader
from tests.support import batch_hash, close_loaders, config, loader_for, take, write_dataset


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    texts = [f"document {number} " * (number % 5 + 1) for number in range(90)]
    return write_dataset(tmp_path_factory.mktemp("data") / "texts", texts)


def new_dataset(folder, num_workers):
    encoder = PackedTaskEncoder(ByteTokenizer(), 32, packing_buffer_docs=6)
    return get_train_dataset(
        folder, worker_config=config(num_workers), batch_size=2, task_encoder=encoder
    )


def new_loader(folder, num_workers=3, **options):
    return loader_for(new_dataset(folder, num_workers), **options)


def hashes(loader, count):
    return [batch_hash(batch) for batch in take(loader, count)]


#: States are stored after every fourth batch of a worker, so most saves say "and draw k again".
SELDOM = {"checkpoint_every_sec": 0, "checkpoint_every_min_n_samples": 4}


@pytest.mark.parametrize("options", [{}, SELDOM], ids=["every batch", "every fourth"])
def test_a_save_right_after_a_resume_is_exact_twice(folder, options):
    expected = hashes(new_loader(folder, **options), 24)
    state, position = None, 0
    for save_point in (11, 12, 13, 24):
        loader = new_loader(folder, **options)
        loader.restore_state_rank(state)
        assert hashes(loader, save_point - position) == expected[position:save_point]
        state, position = loader.save_state_rank(), save_point
        close_loaders()


def test_a_save_after_the_first_batch_waits_for_workers_that_are_still_starting(folder):
    expected = hashes(new_loader(folder), 8)
    close_loaders()
    for _ in range(4):
        first = new_loader(folder)
        assert hashes(first, 1) == expected[:1]
        second = new_loader(folder)
        second.restore_state_rank(first.save_state_rank())
        assert hashes(second, 7) == expected[1:]
        close_loaders()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_save_before_the_first_batch_does_not_hang(folder, num_workers):
    loader = new_loader(folder, num_workers)
    iter(loader)
    state = loader.save_state_rank()
    expected = hashes(loader, 3)
    resumed = new_loader(folder, num_workers)
    resumed.restore_state_rank(state)
    assert hashes(resumed, 3) == expected


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_stock_loader_takes_and_gives_the_same_states(folder, num_workers):
    ours = new_loader(folder, num_workers)
    expected = hashes(ours, 9)
    stock = megatron.energon.get_savable_loader(
        new_dataset(folder, num_workers),
        checkpoint_every_sec=0,
        checkpoint_every_min_n_samples=1,
        gc_collect_every_n_steps=0,  # a wrapper, and as such in the state
    )
    assert hashes(stock, 4) == expected[:4]
    resumed = new_loader(folder, num_workers)
    resumed.restore_state_rank(stock.save_state_rank())
    assert hashes(resumed, 5) == expected[4:]
    ExactDataLoader.close(stock)


@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_workers_store_a_state_where_a_save_asks_for_it_and_hardly_anywhere_else(
    folder, num_workers
):
    """With 10 batches between saves; worker w makes the batches w, w + W, ..."""
    expected = hashes(new_loader(folder, num_workers), 43)
    state, position = None, 0
    for save_point, is_due in [(10, True), (20, True), (30, True), (33, False), (40, True)]:
        loader = new_loader(folder, num_workers, save_every=10)
        loader.restore_state_rank(state)
        assert hashes(loader, save_point - position) == expected[position:save_point]
        state, position = loader.save_state_rank(), save_point
        behind = [worker.offset for worker in state.worker_states]
        assert (sum(behind) == 0) == is_due
        close_loaders()
    resumed = new_loader(folder, num_workers, save_every=10)
    resumed.restore_state_rank(state)
    assert hashes(resumed, 3) == expected[40:]


@pytest.mark.parametrize("save_every", [0, 2.5, True])
def test_an_interval_that_is_no_number_of_batches_is_refused(folder, save_every):
    with pytest.raises(ConfigError, match="save_every: .* an integer >= 1"):
        new_loader(folder, save_every=save_every)
