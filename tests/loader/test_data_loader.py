# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The loader of planned datasets: its state after every batch, its passes and its end."""

import json
import multiprocessing

import pytest
import torch
from megatron.energon import DefaultTaskEncoder, WorkerConfig

from energon_ext import (
    ConfigError,
    DynamicBlendMixin,
    ExactDataLoader,
    PackedTaskEncoder,
    get_train_dataset,
)
from energon_ext.encoders import plan_mix
from energon_ext.tokenizers.tokenizers import ByteTokenizer
from tests.support import (
    batch_hash,
    config,
    loader_for,
    stock_loader_for,
    take,
    write_dataset,
    write_mix,
)
from tests.support import write_tokens as write

SKIP = [[2, 4], [7, 8]]
#: A step has three batches.
ROWS, BATCH = 6, 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write(folder / "a", [[n % 200] * (5 + n % 40) for n in range(50)])
    write(folder / "b", [[n % 200] * (7 + n % 60) for n in range(40)])
    return folder


def mix(folder, *, skip=(), rule="blend", limits=(None, None)):
    path = write_mix(folder / "mix.yaml", [("a", {"linear": {0: 3, 9: 1}}), ("b", 1)])
    content = json.loads(path.read_text())
    entries = content["splits"]["train"].pop("blend")
    for entry, limit in zip(entries, limits):
        entry.update({} if limit is None else {"max_epochs": limit})
    content["splits"]["train"][rule] = entries
    path.write_text(json.dumps({**content, **({"skip": skip} if skip else {})}))
    return path


def new_dataset(path, workers=0, packing="bin", encoder=PackedTaskEncoder, **options):
    return get_train_dataset(
        path,
        worker_config=config(workers),
        batch_size=BATCH,
        rows_per_step=options.pop("rows_per_step", ROWS),
        task_encoder=encoder(ByteTokenizer(), 32, packing=packing, packing_buffer_docs=6),
        **options,
    )


def new_loader(path, workers=0, *, prefetch_factor=2, **options):
    return loader_for(new_dataset(path, workers, **options), prefetch_factor=prefetch_factor)


def hashes(batches):
    return [batch_hash(batch) for batch in batches]


def history(loader, count):
    """Return the hash of each of some batches, with its state as text."""
    return [
        (batch_hash(batch), json.dumps(loader.state_dict()))
        for _, batch in zip(range(count), loader)
    ]


def resumed(path, text, workers=0, **options):
    loader = new_loader(path, workers, **options)
    loader.load_state_dict(json.loads(text))
    return loader


# States -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("packing", "rule", "workers", "prefetch"),
    [
        ("bin", "blend", 4, 8),
        ("sequential", "interleave", 1, 1),
        pytest.param("bin", "blend", 1, 8, marks=pytest.mark.nightly),
        pytest.param("sequential", "interleave", 4, 1, marks=pytest.mark.nightly),
    ],
)
def test_batches_and_states_never_depend_on_workers_or_prefetch(
    folder, packing, rule, workers, prefetch
):
    path = mix(folder, skip=SKIP, rule=rule)
    expected = history(new_loader(path, packing=packing), 24)
    assert len({state for _, state in expected}) == 24
    found = history(new_loader(path, workers, packing=packing, prefetch_factor=prefetch), 24)
    for number, (one, other) in enumerate(zip(found, expected)):
        assert one == other, number
    assert len(found) == 24


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_saves_after_a_resume_equal_those_of_an_uninterrupted_run(folder, workers):
    path = mix(folder, skip=SKIP)
    expected, done, state = history(new_loader(path), 17), 0, None
    for count in (1, 4, 3, 7, 2):  # saves at every batch of a step
        loader = new_loader(path, workers)
        if state is not None:
            loader.load_state_dict(json.loads(state))
        assert history(loader, count) == expected[done : done + count]
        done, (_, state) = done + count, expected[done + count - 1]
        loader.close()


def test_a_mark_gives_the_state_at_its_batch(folder):
    loader = new_loader(mix(folder, skip=SKIP), 1)
    marks = [(loader.mark(), loader.state_dict()) for _ in zip(range(10), loader)]
    assert [loader.state_dict(mark) for mark, _ in marks] == [state for _, state in marks]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_state_from_before_the_first_batch_starts_there(folder, workers):
    path = mix(folder)
    loader = new_loader(path, workers)
    iter(loader)
    state = loader.state_dict()
    assert (state["plan"]["row"], state["done"], loader.batches_drawn) == (0, 0, 0)
    again = resumed(path, json.dumps(state), workers)
    assert again.state_dict() == state
    assert hashes(take(again, 3)) == hashes(take(new_loader(path), 3))


def test_energons_save_and_restore_method_names_work_too(folder):
    loader = new_loader(mix(folder))
    take(loader, 5)
    assert loader.save_state_rank() == loader.state_dict()
    again = new_loader(mix(folder))
    again.restore_state_rank(None)
    again.restore_state_rank(loader.save_state_rank())
    assert hashes(take(again, 4)) == hashes(take(loader, 4))
    assert [change.change for change in again.changes] == ["kept", "kept"]
    assert again.batches_drawn == 9


def test_state_size_does_not_grow_with_batches_read(folder):
    loader = new_loader(mix(folder), rows_per_step=BATCH, packing="sequential")
    sizes = {}
    for number, _ in zip(range(1, 1001), loader):
        if number in (10, 1000):
            sizes[number] = len(json.dumps(loader.state_dict()))
    assert sizes[1000] <= sizes[10] + 40  # counts have more digits


# Passes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_an_ended_run_stays_ended_until_a_limit_is_raised(folder, workers):
    loader = new_loader(mix(folder, limits=(1, 1)), workers)
    batches = list(loader)
    assert len(batches) > 20
    at_end = loader.state_dict()
    assert list(loader) == [] and loader.state_dict() == at_end
    more = resumed(mix(folder, limits=(2, 1)), json.dumps(at_end), workers)
    assert sum(batch.documents_per_source().get("a", 0) for batch in more) == 50


@pytest.mark.parametrize("workers", [0, 2])
def test_passes_follow_each_other_without_repeat(folder, workers):
    loader = new_loader(mix(folder), workers, repeat=False)
    first = history(loader, 1000)
    assert history(loader, 1000) == first
    again = resumed(mix(folder), first[-2][1], workers, repeat=False)
    assert history(again, 1000) == first[-1:]
    assert history(again, 1000) == first


@pytest.mark.parametrize(("workers", "offsets"), [(0, range(-1, 4)), (2, (-1, 1))])
def test_an_epochized_blend_resumes_anywhere_in_its_second_pass(
    folder, workers, offsets, monkeypatch
):
    """In particular after its first batch, whose two rows cannot show all three sources."""
    monkeypatch.setattr(plan_mix, "MAX_BUFFER_DOCS", 1)  # many plans per pass
    for name in ("c", "d"):
        write(folder / name, [[7 + n] * (9 + n % 20) for n in range(12)])
    path = write_mix(folder / "epochized.yaml", [])
    entries = [{"path": name, "repetitions": 1} for name in "acd"]
    content = json.loads(path.read_text())
    splits = {"train": {"blend_epochized": entries}}
    path.write_text(json.dumps({**content, "splits": splits}))
    options = {"rows_per_step": BATCH}
    whole = len(list(new_loader(path, repeat=False, **options)))
    path.write_text(json.dumps({**content, "splits": splits, "skip": [[whole + 2, whole + 4]]}))
    expected = history(new_loader(path, **options), whole + 20)
    for done in (whole + offset for offset in offsets):
        again = resumed(path, expected[done - 1][1], workers, **options)
        assert history(again, 16) == expected[done : done + 16], done
        again.close()


@pytest.mark.parametrize(("workers", "saves"), [(0, (3, 5, 8, 13)), (2, (5, 8))])
def test_virtual_epochs_with_skipped_steps_end_the_same_after_a_resume(folder, workers, saves):
    path, length = mix(folder, skip=SKIP), 8

    def epochs(loader, count):
        return [history(loader, 1000) for _ in range(count)]

    expected = epochs(new_loader(path, virtual_epoch_length=length), 4)
    assert [len(epoch) for epoch in expected] == [length] * 4
    for done in saves:
        state = [state for epoch in expected for _, state in epoch][done - 1]
        loader = resumed(path, state, workers, virtual_epoch_length=length)
        number, place = divmod(done, length)
        assert epochs(loader, 2) == [expected[number][place:], expected[number + 1]]
        loader.close()


@pytest.mark.parametrize("others", [loader_for, stock_loader_for])
def test_two_loaders_over_one_dataset_continue_each_other(folder, others):
    """The plan of the other loader is a step ahead, or was drawn in another process."""
    path = mix(folder)
    expected = hashes(take(new_loader(path), 9))
    dataset = new_dataset(path)
    found = []
    for number in range(9):
        loader = (loader_for, others)[number % 2](dataset)
        found += hashes(take(loader, 1))
    assert found == expected


# The end ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_a_closed_loader_keeps_its_state_but_draws_nothing(folder, workers):
    path = mix(folder)
    loader = new_loader(path, workers)
    expected = history(loader, 4)
    iterator = iter(loader)
    loader.close()
    with pytest.raises(ConfigError, match="^This loader was closed; create a new one and load "):
        next(iterator)
    assert multiprocessing.active_children() == []
    for _ in range(2):
        with pytest.raises(ConfigError, match="^This loader was closed; create a new one and "):
            iter(loader)
        assert json.dumps(loader.state_dict()) == expected[-1][1]
        loader.close()
    with pytest.raises(ConfigError, match="before the first batch, in a new loader"):
        loader.load_state_dict(loader.state_dict())


def test_a_loader_refuses_a_state_after_its_pass_has_ended(folder):
    loader = new_loader(mix(folder, limits=(1, 1)))
    before = loader.state_dict()
    assert len(list(loader)) > 1
    with pytest.raises(ConfigError, match="before the first batch, in a new loader"):
        loader.load_state_dict(before)


@pytest.mark.parametrize(
    ("option", "value"), [("prefetch_factor", 0), ("prefetch_factor", 2.5), ("timeout", 0)]
)
def test_invalid_options_are_refused(folder, option, value):
    with pytest.raises(ConfigError, match=f"ExactDataLoader: {option}: {value} found"):
        ExactDataLoader(new_dataset(mix(folder)), **{option: value})


class Plain(DynamicBlendMixin, DefaultTaskEncoder):
    """Samples as they are, streamed."""

    plan_samples = False


def test_a_dataset_that_is_not_planned_is_refused_with_a_remedy(folder, tmp_path):
    write_dataset(tmp_path / "text", ["some words"] * 20)
    streamed = get_train_dataset(
        tmp_path / "text", worker_config=config(), batch_size=2, task_encoder=Plain()
    )
    with pytest.raises(ConfigError, match="with streamed sources found.*get_savable_loader"):
        ExactDataLoader(streamed)

    class Wrapped:
        datasets = (new_dataset(mix(folder)),)

    with pytest.raises(ConfigError, match="Wrapped around a planned dataset.*encode_batch"):
        ExactDataLoader(Wrapped())


# What the encoder sees ----------------------------------------------------------------------------


class Asking(PackedTaskEncoder):
    """Returns the reader of the batch according to Energon, and a random number of torch."""

    def encode_batch(self, batch):
        active = WorkerConfig.active_worker_config
        return active.active_worker_batch_index, active.rank_worker_id(), torch.rand(()).item()


@pytest.mark.parametrize("workers", [0, 3])
def test_an_encoder_sees_the_energon_worker_whose_turn_it_is(folder, workers):
    loader = new_loader(mix(folder), workers, encoder=Asking)
    state = torch.get_rng_state()
    found = take(loader, 7)
    turns = max(1, workers)
    assert [who[:2] for who in found] == [(n, n % turns) for n in range(7)]
    assert len({number for *_, number in found}) == 7
    if workers:
        assert torch.equal(torch.get_rng_state(), state), "the model's random state changed"
    again = resumed(mix(folder), json.dumps(loader.state_dict()), workers, encoder=Asking)
    assert [who[:2] for who in take(again, 3)] == [(n, n % turns) for n in (7, 8, 9)]
    assert WorkerConfig.active_worker_config is None
