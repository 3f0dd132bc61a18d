# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Energon's own loader over a planned dataset: each worker plans and reads its own batches."""

import copy
import json

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from megatron.energon.tools.checkpoint import command_redist

from energon_ext import MultiSpliceTaskEncoder, PackedTaskEncoder, get_train_dataset
from energon_ext.splice import MultiSpliceConfig
from energon_ext.tokenizers.tokenizers import ByteTokenizer
from tests.support import (
    batch_hash,
    config,
    loader_for,
    stock_loader_for,
    take,
    write_mix,
    write_tokens,
)

every_number_of_workers = pytest.mark.parametrize(
    "workers", [0, pytest.param(1, marks=pytest.mark.nightly), 3]
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    for source in "xy":
        lengths = np.random.default_rng(ord(source)).integers(1, 60, 120)
        write_tokens(folder / source, [[ord(source) + n % 50] * n for n in lengths.tolist()])
    return folder


def packed(packing="bin"):
    return PackedTaskEncoder(ByteTokenizer(), 24, packing=packing, packing_buffer_docs=6)


def spliced():
    splice = MultiSpliceConfig(num_docs=5, content_length=7, pack_contents=True)
    subflavors = {"splice": True}
    return MultiSpliceTaskEncoder(ByteTokenizer(), 24, splice, spliced_subflavors=subflavors)


#: Rule and encoder.
MIXES = {
    "blend": ("blend", packed),
    "sequential": ("interleave", lambda: packed("sequential")),
    "spliced": ("interleave", spliced),
}


def new_dataset(
    folder, name="blend", workers=0, rank=1, ranks=2, weight=1, skip=((3, 5),), **options
):
    rule, encoder = MIXES[name]
    path = write_mix(folder / f"{name}.yaml", [("x", weight), ("y", {"linear": {0: 1, 20: 5}})])
    content = json.loads(path.read_text())
    entries = content["splits"]["train"].pop("blend")
    entries[0]["max_epochs"] = 1
    entries[1]["subflavors"] = {"splice": True}
    content["splits"]["train"][rule] = entries
    path.write_text(json.dumps({**content, "skip": skip}))
    return get_train_dataset(
        path,
        worker_config=config(workers, rank, ranks),
        batch_size=2,
        rows_per_step=8,
        task_encoder=encoder(),
        **options,
    )


def hashes(loader, count):
    return [batch_hash(batch) for batch in take(loader, count)]


def check_resumes(folder, name, workers, saves, count):
    expected = hashes(loader_for(new_dataset(folder, name, workers)), count)
    loader = stock_loader_for(new_dataset(folder, name, workers))
    iterator, found = iter(loader), []
    for number in range(1, count + 1):
        found.append(batch_hash(next(iterator)))
        if number in saves:
            resumed = stock_loader_for(new_dataset(folder, name, workers))
            resumed.restore_state_rank(loader.save_state_rank())
            assert hashes(resumed, 4) == expected[number : number + 4], number
            again = stock_loader_for(new_dataset(folder, name, workers))
            again.restore_state_rank(resumed.save_state_rank())
            assert hashes(again, 2) == expected[number + 4 : number + 6], number
    assert found == expected


@pytest.mark.parametrize(
    ("name", "workers"),
    [
        ("blend", 3),
        ("sequential", 0),
        ("spliced", 3),
        *(
            pytest.param(*mix, marks=pytest.mark.nightly)
            for mix in zip([*MIXES, *MIXES], (0, 1, 0, 1, 3, 1))
        ),
    ],
)
def test_batches_equal_those_of_the_exact_loader_even_after_two_resumes(folder, name, workers):
    check_resumes(folder, name, workers, saves=[7], count=13)


@pytest.mark.nightly
@pytest.mark.parametrize("workers", range(5))
@pytest.mark.parametrize("name", MIXES)
def test_resumes_are_exact_at_every_batch_once_all_workers_yielded(folder, name, workers):
    check_resumes(folder, name, workers, saves=range(max(1, workers), 25), count=30)


@pytest.mark.parametrize(
    ("ranks", "workers", "new_ranks", "new_workers"),
    [(2, 2, 4, 1), pytest.param(2, 2, 1, 4, marks=pytest.mark.nightly), (2, 1, 1, 2)],
)
def test_states_that_energon_redistributed_are_refused(
    folder, tmp_path, ranks, workers, new_ranks, new_workers
):
    """They are parts of one plan: on other workers, rows would be repeated and lost."""
    files = [tmp_path / f"state_{rank}.pt" for rank in range(ranks)]
    for rank, file in enumerate(files):
        loader = stock_loader_for(new_dataset(folder, workers=workers, rank=rank, ranks=ranks))
        take(loader, 4)
        torch.save(loader.save_state_rank(), file)
    (tmp_path / "new").mkdir()
    size = ("--new-world-size", str(new_ranks))
    done = CliRunner().invoke(command_redist, [*map(str, files), str(tmp_path / "new"), *size])
    assert done.exit_code == 0, done.output
    state = torch.load(tmp_path / "new" / "state_0.pt", weights_only=False)
    dataset = new_dataset(folder, workers=new_workers, rank=0, ranks=new_ranks)
    loader = stock_loader_for(dataset)
    with pytest.raises(Exception, match="StateMismatchError|ranks x workers") as error:
        loader.restore_state_rank(state)
        next(iter(loader))
    assert "ExactDataLoader" in str(error.value)


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_state_without_workers_continues_on_other_ranks(folder, ranks):
    saved = stock_loader_for(new_dataset(folder, rank=0))
    take(saved, 2)
    resumed = stock_loader_for(new_dataset(folder, rank=0, ranks=ranks))
    resumed.restore_state_rank(saved.save_state_rank())
    exact = loader_for(new_dataset(folder, rank=0, ranks=ranks))
    rest = 4 // ranks  # batches of the first step
    assert hashes(resumed, 3) == hashes(exact, rest + 3)[rest:]


@every_number_of_workers
def test_virtual_epochs_equal_those_of_the_exact_loader(folder, workers):
    exact = loader_for(new_dataset(folder, workers=workers, virtual_epoch_length=6))
    stock = stock_loader_for(new_dataset(folder, workers=workers, virtual_epoch_length=6))
    expected = [[batch_hash(batch) for batch in exact] for _ in range(5)]
    assert [[batch_hash(batch) for batch in stock] for _ in range(3)] == expected[:3]
    resumed = stock_loader_for(new_dataset(folder, workers=workers, virtual_epoch_length=6))
    resumed.restore_state_rank(stock.save_state_rank())
    assert [[batch_hash(batch) for batch in resumed] for _ in range(2)] == expected[3:]


@pytest.mark.parametrize("done", [4, 7])
def test_virtual_epochs_resumed_between_two_turns_read_every_batch_once_in_another_order(
    folder, done
):
    """Energon begins each later pass with the worker that was next, of three."""

    def new_loader():
        return stock_loader_for(new_dataset(folder, workers=3, virtual_epoch_length=6))

    planned = hashes(loader_for(new_dataset(folder)), done + 27)
    numbers = {each: number for number, each in enumerate(planned)}
    loader, count = new_loader(), 0
    while count < done:
        for _ in loader:
            count += 1
            if count == done:
                break
    resumed = new_loader()
    resumed.restore_state_rank(loader.save_state_rank())
    found = [numbers[batch_hash(batch)] for _ in range(3) for batch in resumed]
    assert len(set(found)) == len(found)
    assert {*range(done, done + 9)} <= {*found} and found != sorted(found)


@every_number_of_workers
def test_a_pass_ends_for_all_workers_before_the_next_begins(folder, workers):
    for source in "xy":
        write_tokens(folder / f"few_{source}", [[ord(source)] * 50] * 12)

    def new_pass():
        path = write_mix(folder / "once.yaml", [("few_x", 1), ("few_y", 1)])
        return get_train_dataset(
            path,
            worker_config=config(workers),
            batch_size=2,
            task_encoder=packed(),
            repeat=False,
        )

    expected = [batch_hash(batch) for batch in loader_for(new_pass())]
    loader = stock_loader_for(new_pass())
    for _ in range(2):
        assert [batch_hash(batch) for batch in loader] == expected


# Changes between two saves ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(folder):
    """The states of two ranks with two workers each, after every worker has yielded."""
    states = []
    for rank in range(2):
        loader = stock_loader_for(new_dataset(folder, workers=2, rank=rank))
        take(loader, 5)
        states.append(loader.save_state_rank())
    return states


def refusal(dataset, state):
    """Return the message with which the workers of Energon's loader refuse a state."""
    loader = stock_loader_for(dataset)
    loader.restore_state_rank(state)
    with pytest.raises(Exception, match="StateMismatchError") as raised:  # torch rebuilds the type
        next(iter(loader))
    return str(raised.value)


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("mixture", {"weight": 9}),
        ("skip", {"skip": [[3, 5], [7, 8]]}),
        ("virtual_epoch_length", {"virtual_epoch_length": 8}),
        ("ranks", {"ranks": 4}),
    ],
)
def test_what_the_workers_draw_again_may_not_change(folder, saved, field, change):
    message = refusal(new_dataset(folder, workers=2, **change), copy.deepcopy(saved[1]))
    assert f"({field}: saved " in message
    assert "workers, which are at different batches; keep these settings, or use Exact" in message


def test_without_workers_the_mix_may_change_between_steps_as_for_the_exact_loader(folder):
    loader, exact = (make(new_dataset(folder)) for make in (stock_loader_for, loader_for))
    take(loader, 4), take(exact, 4)  # two steps
    resumed, expected = (
        make(new_dataset(folder, weight=9)) for make in (stock_loader_for, loader_for)
    )
    resumed.restore_state_rank(loader.save_state_rank())
    expected.load_state_dict(exact.state_dict())
    assert hashes(resumed, 9) == hashes(expected, 9)
