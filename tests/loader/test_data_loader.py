# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The state of a loader around its start, where the stock one is not exact."""

import json
import time

import megatron.energon
import pytest

from energon_ext import ConfigError, PackedTaskEncoder, StateMismatchError, get_train_dataset
from energon_ext.encoders.tokenizers import ByteTokenizer
from energon_ext.loader.data_loader import ExactDataLoader
from energon_ext.state.schema import digest_of
from tests.support import (
    batch_hash,
    close_loaders,
    config,
    loader_for,
    take,
    write_dataset,
    write_mix,
    write_tokens,
)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    texts = [f"document {number} " * (number % 5 + 1) for number in range(90)]
    write_dataset(folder / "texts", texts)
    write_tokens(folder / "tokens", [[n % 200] * (5 + n % 40) for n in range(90)])
    return {
        "streamed": folder / "texts",
        "planned": write_mix(folder / "planned.yaml", [("tokens", 1)]),
    }


KINDS = ["streamed", "planned"]


def new_dataset(path, num_workers, rank=0, ranks=1, **options):
    encoder = PackedTaskEncoder(ByteTokenizer(), 32, packing_buffer_docs=6)
    return get_train_dataset(
        path,
        worker_config=config(num_workers, rank, ranks),
        batch_size=options.pop("batch_size", 2),
        task_encoder=encoder,
        **options,
    )


def new_loader(path, num_workers=3, **options):
    own = {key: options.pop(key) for key in ("rows_per_step",) if key in options}
    return loader_for(new_dataset(path, num_workers, **own), **options)


def hashes(loader, count):
    return [batch_hash(batch) for batch in take(loader, count)]


#: States are stored after every fourth batch of a worker, so most saves say "and draw k again".
SELDOM = {"checkpoint_every_sec": 0, "checkpoint_every_min_n_samples": 4}


@pytest.mark.parametrize(("kind", "options"), [("planned", {}), ("streamed", SELDOM)])
def test_a_save_right_after_a_resume_is_exact_twice(data, kind, options):
    expected = hashes(new_loader(data[kind], **options), 24)
    state, position = None, 0
    for save_point in (11, 12, 24):
        loader = new_loader(data[kind], **options)
        loader.restore_state_rank(state)
        assert hashes(loader, save_point - position) == expected[position:save_point]
        state, position = loader.save_state_rank(), save_point
        close_loaders()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_a_state_is_saved_again_before_a_batch_and_restored_twice(data, kind, workers):
    """A run that is stopped before it has drawn anything saves what it was given."""
    loader = new_loader(data[kind], workers)
    hashes(loader, 5)
    state = loader.save_state_rank()
    expected = hashes(loader, 4)
    digest = digest_of(state)
    resumed = new_loader(data[kind], workers)
    resumed.restore_state_rank(state)
    assert resumed.batches_drawn == 5
    again = resumed.save_state_rank()
    iter(resumed)  # of which stock makes workers that do not exist yet
    assert digest_of(resumed.save_state_rank()) == digest_of(again)
    assert hashes(resumed, 4) == expected
    for given in (state, again):
        resumed = new_loader(data[kind], workers)
        resumed.restore_state_rank(given)
        assert hashes(resumed, 4) == expected
    assert digest_of(state) == digest


def test_a_save_after_the_first_batch_waits_for_workers_that_are_still_starting(data):
    expected = hashes(new_loader(data["streamed"]), 8)
    close_loaders()
    for _ in range(2):
        first = new_loader(data["streamed"])
        assert hashes(first, 1) == expected[:1]
        second = new_loader(data["streamed"])
        second.restore_state_rank(first.save_state_rank())
        assert hashes(second, 7) == expected[1:]
        close_loaders()


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_a_save_before_the_first_batch_does_not_hang(data, kind, num_workers):
    loader = new_loader(data[kind], num_workers)
    iter(loader)
    state = loader.save_state_rank()
    expected = hashes(loader, 3)
    resumed = new_loader(data[kind], num_workers)
    resumed.restore_state_rank(state)
    assert hashes(resumed, 3) == expected


@pytest.mark.parametrize("workers", [0, 2])
def test_a_cursor_from_before_the_first_batch_starts_at_the_first(data, workers):
    cursor = new_loader(data["planned"], workers).state_dict()
    assert (cursor["plan"]["row"], cursor["done"]) == (0, 0)
    for resuming in (0, 3):
        loader = new_loader(data["planned"], resuming)
        loader.load_state_dict(json.loads(json.dumps(cursor)))
        assert loader.state_dict() == cursor
        assert hashes(loader, 3) == hashes(new_loader(data["planned"], 0), 3)


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_the_stock_loader_takes_and_gives_the_same_states(data, kind, num_workers):
    def stock_loader():
        return megatron.energon.get_savable_loader(
            new_dataset(data[kind], num_workers),
            checkpoint_every_sec=0,
            checkpoint_every_min_n_samples=1,
            gc_collect_every_n_steps=0,  # a wrapper, and as such in the state
        )

    ours = new_loader(data[kind], num_workers)
    expected = hashes(ours, 5)
    state = ours.save_state_rank()
    expected += hashes(ours, 4)
    stock = stock_loader()
    assert hashes(stock, 4) == expected[:4]
    resumed = new_loader(data[kind], num_workers)
    resumed.restore_state_rank(stock.save_state_rank())
    assert hashes(resumed, 5) == expected[4:]
    ExactDataLoader.close(stock)
    continued = stock_loader()
    continued.restore_state_rank(state)
    assert hashes(continued, 4) == expected[5:]
    ExactDataLoader.close(continued)


@pytest.mark.parametrize(
    ("kind", "num_workers"), [("streamed", 1), ("streamed", 3), ("planned", 2)]
)
def test_workers_store_a_state_where_a_save_asks_for_it_and_hardly_anywhere_else(
    data, kind, num_workers
):
    """With 10 batches between saves; worker w makes the batches w, w + W, ..."""
    expected = hashes(new_loader(data[kind], num_workers), 33)
    state, position = None, 0
    for save_point, is_due in [(10, True), (20, True), (23, False), (30, True)]:
        loader = new_loader(data[kind], num_workers, save_every=10)
        loader.restore_state_rank(state)
        assert hashes(loader, save_point - position) == expected[position:save_point]
        state, position = loader.save_state_rank(), save_point
        behind = [worker.offset for worker in state.worker_states]
        # A planned run plans on to where it stands, and has nothing to make again.
        assert (sum(behind) == 0) == (is_due or kind == "planned")
        close_loaders()
    resumed = new_loader(data[kind], num_workers, save_every=10)
    resumed.restore_state_rank(state)
    assert hashes(resumed, 3) == expected[30:]


@pytest.mark.parametrize("rows_per_step", [2, 6])
def test_a_cursor_is_the_same_at_every_batch_however_seldom_workers_store_one(data, rows_per_step):
    alone = new_loader(data["planned"], 0, rows_per_step=rows_per_step)
    batches = iter(alone)
    seldom = new_loader(data["planned"], 2, save_every=10, rows_per_step=rows_per_step)
    for drawn in range(1, 24):
        assert hashes(seldom, 1) == [batch_hash(next(batches))]
        assert seldom.state_dict() == alone.state_dict(), drawn
    restored = new_loader(data["planned"], 0, rows_per_step=rows_per_step)
    restored.restore_states([seldom.save_state_rank()])
    assert hashes(restored, 3) == hashes(seldom, 3)


def test_states_that_workers_store_seldom_continue_on_other_ranks(data):
    """Regression: the batches since were counted in those of the ranks of now."""

    def of_ranks(ranks, workers, **options):
        return [
            loader_for(
                new_dataset(data["planned"], workers, rank, ranks, rows_per_step=8), **options
            )
            for rank in range(ranks)
        ]

    expected = hashes(new_loader(data["planned"], 0, rows_per_step=8), 36)
    two = of_ranks(2, 2, save_every=10)
    for loader in two:
        hashes(loader, 14)  # seven steps of two batches a rank
    states = [loader.save_state_rank() for loader in two]
    for ranks in (1, 4):
        found = [[] for _ in range(ranks)]
        for rank, loader in enumerate(of_ranks(ranks, 0)):
            loader.restore_states(states)
            found[rank] = hashes(loader, 8 // ranks)
        rounds = [batch for of_round in zip(*found) for batch in of_round]
        assert rounds == expected[28:36]


@pytest.mark.parametrize("save_every", [0, 2.5, True])
def test_an_interval_that_is_no_number_of_batches_is_refused(data, save_every):
    with pytest.raises(ConfigError, match="save_every: .* an integer >= 1"):
        new_loader(data["streamed"], save_every=save_every)


def test_a_loader_in_the_place_of_its_dataset_is_refused(data):
    with pytest.raises(ConfigError, match="^ExactDataLoader found, a dataset of Energon is"):
        ExactDataLoader(new_loader(data["streamed"]))


# The end of a pass --------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "workers"), [("planned", 0), ("planned", 2), ("streamed", 2)])
def test_the_end_of_a_pass_is_nobodys_beginning_before_it_is_reached(data, kind, workers):
    """Workers are ahead: one may have ended its pass while batches of it are still to come."""

    def new_pass():
        return loader_for(new_dataset(data[kind], workers, repeat=False, batch_size=1))

    whole = [batch_hash(batch) for batch in new_pass()]
    for left in (1, 0):
        loader = new_pass()
        hashes(loader, len(whole) - left)
        time.sleep(0.3)  # for the workers to come to their ends
        resumed = new_pass()
        resumed.restore_state_rank(loader.save_state_rank())
        assert [batch_hash(batch) for batch in resumed] == whole[len(whole) - left :]
        if kind == "planned":  # others are shuffled on
            assert [batch_hash(batch) for batch in resumed] == whole
        close_loaders()


@pytest.mark.parametrize(("kind", "workers"), [("planned", 0), ("planned", 2), ("streamed", 2)])
def test_after_a_whole_pass_the_next_one_is_resumed(data, kind, workers):
    loader = loader_for(new_dataset(data[kind], workers, repeat=False))
    assert list(loader)
    state = loader.save_state_rank()
    resumed = loader_for(new_dataset(data[kind], workers, repeat=False))
    resumed.restore_state_rank(state)
    assert [batch_hash(b) for b in resumed] == [batch_hash(b) for b in loader]


# Virtual epochs -----------------------------------------------------------------------------------


def epochs_loader(path, num_workers, length=4, rank=0, ranks=1):
    dataset = new_dataset(path, num_workers, rank, ranks, virtual_epoch_length=length)
    return loader_for(dataset)


def endless(loader, count):
    """Batches of one virtual epoch after the other."""
    found = []
    while len(found) < count:
        iterator = iter(loader)
        while len(found) < count and (batch := next(iterator, None)) is not None:
            found.append(batch_hash(batch))
    return found


@pytest.mark.parametrize(("kind", "num_workers"), [("planned", 0), ("planned", 2), ("streamed", 2)])
def test_virtual_epochs_continue_exactly_or_not_at_all(data, kind, num_workers):
    """Epochs of 4 batches. Of two workers, one has finished its half before the other."""
    expected = endless(epochs_loader(data[kind], num_workers), 18)
    for save_point in (3, 5):
        loader = epochs_loader(data[kind], num_workers)
        endless(loader, save_point)
        resumed = epochs_loader(data[kind], num_workers)
        if num_workers == 2 and save_point == 3:
            with pytest.raises(StateMismatchError, match="after a multiple of num_workers"):
                resumed.restore_state_rank(loader.save_state_rank())
            continue
        resumed.restore_state_rank(loader.save_state_rank())
        assert endless(resumed, 10) == expected[save_point : save_point + 10]
        close_loaders()


def test_virtual_epochs_end_where_they_did_on_other_workers(data):
    """After 5 batches of a run whose epochs have 8, an epoch has 3 batches left, on any workers."""
    first = epochs_loader(data["planned"], 2, length=8)
    endless(first, 5)
    cursor = first.state_dict()
    expected = endless(epochs_loader(data["planned"], 0, length=8), 24)[5:]
    for num_workers in (0, 1, 2, 4):
        resumed = epochs_loader(data["planned"], num_workers, length=8)
        if num_workers == 4:
            with pytest.raises(StateMismatchError, match="after a multiple of num_workers"):
                resumed.load_state_dict(cursor)
            continue
        resumed.load_state_dict(cursor)
        assert [batch_hash(batch) for batch in resumed] == expected[:3]
        assert [batch_hash(batch) for batch in resumed] == expected[3:11]
        assert [batch_hash(batch) for batch in resumed] == expected[11:19]


def test_virtual_epochs_of_streams_go_on_in_other_ranks(data):
    """1 rank of 4 workers becomes 2 of 2: a worker has 2 batches of an epoch, and then 4."""
    length = 8
    whole = epochs_loader(data["streamed"], 4, length)
    endless(whole, 12)
    states = [whole.save_state_rank()]
    expected = endless(whole, 24)
    for rank in (0, 1):
        half = epochs_loader(data["streamed"], 2, length, rank, ranks=2)
        half.restore_states(states)
        # Each of the old workers had made 3 batches; 6 of this rank, so 2 of its epoch are left.
        ours = [expected[turn * 4 + 2 * rank + own] for turn in range(5) for own in (0, 1)]
        assert [batch_hash(batch) for batch in half] == ours[:2]
        assert [batch_hash(batch) for batch in half] == ours[2:10]
