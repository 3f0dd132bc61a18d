# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""A state with anything changed is refused, by its type, and nothing begins."""

import dataclasses
import json
import random
import time

import pytest
from megatron.energon.savable_loader import SavableDataLoaderState
from megatron.energon.state import FlexState

from energon_ext import (
    ConfigError,
    PackedTaskEncoder,
    StateMismatchError,
    get_train_dataset,
)
from energon_ext.encoders.tokenizers import ByteTokenizer
from energon_ext.errors import StateFormatError
from energon_ext.state.schema import SEAL, check_seal, digest_of, sealed
from tests.state.mutations import mutations
from tests.support import (
    batch_hash,
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
    # Documents longer than a row, so that some are carried over; more documents than a buffer.
    write_tokens(folder / "short", [[n % 200] * (8 + n % 9) for n in range(1, 91)])
    write_tokens(folder / "long", [[n % 200] * 50 for n in range(1, 91)])
    write_dataset(folder / "text", [f"document {number} " * 3 for number in range(60)])
    planned = write_mix(folder / "planned.yaml", [("short", 1), ("long", 1)])
    planned.write_text(planned.read_text().replace('"blend"', '"interleave"'))
    write_mix(folder / "streamed.yaml", [("text", 1), ("long", 1)])
    write_mix(folder / "short.yaml", [("short", 1)])
    return folder


def new_loader(data, name="planned", workers=0, rank=0, ranks=1, rows=4, **options):
    encoder = {"seq_len": 32, "packing_buffer_docs": 4, **options.pop("encoder", {})}
    seed = options.pop("seed", 0)
    dataset = get_train_dataset(
        data / f"{name}.yaml",
        worker_config=config(workers, rank, ranks, seed),
        batch_size=options.pop("batch_size", 1),
        rows_per_step=None if name == "streamed" else rows,
        shuffle_buffer_size=4,
        task_encoder=PackedTaskEncoder(ByteTokenizer(), **encoder),
        **options,
    )
    return loader_for(dataset)


def hashes(loader, count):
    return [batch_hash(batch) for batch in take(loader, count)]


def saved_after(batches, *arguments, **options):
    """What ``save_state_rank`` gives after some batches, and the four batches that follow."""
    loader = new_loader(*arguments, **options)
    take(loader, batches)
    state = loader.save_state_rank()
    following = hashes(loader, 4)
    loader.close()
    return state, following


# One cursor ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cursors(data):
    """At the end of a step; inside one; and with a source that is away."""
    loader = new_loader(data)
    take(loader, 8)
    at_end = loader.state_dict()
    take(loader, 2)
    inside = loader.state_dict()
    assert (at_end["done"], inside["done"]) == (0, 2)
    alone = new_loader(data, "short")
    alone.load_state_dict(at_end)
    take(alone, 4)
    retained = alone.state_dict()
    assert set(retained["plan"]["sources"]) == {"short", "long"}
    return {"planned": [at_end, inside], "short": [retained]}


def check_refused(loader, load, state, error, what):
    """That a state is refused within a second, and that the loader stands at its start."""
    start = time.process_time()
    with pytest.raises(error):
        load(state)
        pytest.fail(f"accepted: {what}")
    assert time.process_time() - start <= 1, what
    assert loader.batches_drawn == 0, what


@pytest.mark.parametrize(("name", "which"), [("planned", 0), ("planned", 1), ("short", 0)])
def test_a_cursor_with_anything_changed_is_refused_and_nothing_begins(data, cursors, name, which):
    loader = new_loader(data, name)
    at_start = loader.state_dict()
    for what, mutated in mutations(cursors[name][which], 400, seed=which):
        check_refused(loader, loader.load_state_dict, mutated, StateFormatError, what)
        assert loader.state_dict() == at_start, what
    assert hashes(loader, 6) == hashes(new_loader(data, name), 6)


def test_a_cursor_cut_anywhere_is_refused(data, cursors):
    text = json.dumps(cursors["planned"][1])
    loader = new_loader(data)
    chance = random.Random(0)
    for cut in chance.sample(range(1, len(text)), 300):
        with pytest.raises(ValueError):  # noqa: PT011
            json.loads(text[:cut])
        for mended in mended_texts(text[:cut]):
            if mended == cursors["planned"][1]:
                continue  # only the last bracket was gone
            check_refused(loader, loader.load_state_dict, mended, StateFormatError, cut)
        check_refused(loader, loader.load_state_dict, text[:cut], StateFormatError, cut)
    assert hashes(loader, 2) == hashes(new_loader(data), 2)


def mended_texts(text):
    """What a reader that closes open brackets makes of a text that was cut."""
    opened, in_string, escaped = [], False, False
    for character in text:
        if in_string:
            in_string = escaped or character != '"'
            escaped = character == "\\" and not escaped
        elif character in "[{":
            opened.append("]" if character == "[" else "}")
        elif character in "]}":
            opened.pop()
        else:
            in_string = character == '"'
    for ending in ('"' * in_string, '": null' if in_string else ": null", "null"):
        try:
            yield json.loads(text.rstrip(", ") + ending + "".join(reversed(opened)))
        except ValueError:
            continue


def test_the_cut_texts_that_can_be_mended_are_many(cursors):
    text = json.dumps(cursors["planned"][1])
    cuts = random.Random(0).sample(range(1, len(text)), 300)
    assert sum(any(True for _ in mended_texts(text[:cut])) for cut in cuts) > 200
    assert list(mended_texts('{"a": [1, {"b": "c')) == [
        {"a": [1, {"b": "c"}]},
    ]


def test_a_cursor_without_end_is_refused(data, cursors):
    deep = []
    for _ in range(5000):
        deep = [deep]
    for endless in (deep, 10**5000, float("nan")):
        state = {**cursors["planned"][0], "done": endless}
        with pytest.raises(StateFormatError):
            new_loader(data).load_state_dict(state)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"seed": 1}, "seed: saved 0, now 1"),
        ({"encoder": {"seq_len": 64}}, "seq_len: saved 32, now 64"),
        ({"encoder": {"packing": "sequential"}}, "packing: saved 'bin', now 'sequential'"),
        ({"encoder": {"train_on_eos": False}}, "train_on_eos: saved True, now False"),
    ],
)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_whole_cursor_of_another_configuration_is_a_mismatch(
    data, cursors, options, field, workers
):
    loader = new_loader(data, workers=workers, **options)
    with pytest.raises(StateMismatchError, match=field):
        loader.load_state_dict(cursors["planned"][0])
    assert loader.batches_drawn == 0
    assert hashes(loader, 2) == hashes(new_loader(data, **options), 2)


@pytest.mark.parametrize("workers", [0, 2])
def test_other_documents_are_a_mismatch_before_a_worker_starts(data, cursors, workers, tmp_path):
    write_tokens(tmp_path / "short", [[n % 200] * (8 + n % 9) for n in range(1, 91)])
    write_tokens(tmp_path / "long", [[n % 200] * 51 for n in range(1, 91)])
    mix = write_mix(tmp_path / "planned.yaml", [("short", 1), ("long", 1)])
    mix.write_text(mix.read_text().replace('"blend"', '"interleave"'))
    loader = new_loader(tmp_path, workers=workers)
    with pytest.raises(StateMismatchError, match="long: tokens: saved 4500, now 4590"):
        loader.load_state_dict(cursors["planned"][0])
    assert hashes(loader, 1) == hashes(new_loader(tmp_path), 1)


def test_the_digest_tells_types_and_keys_apart():
    alike = [1, 1.0, True, "1", b"1", [1], (1,), {"1": 1}, {1: 1}, None, "null", [], (), {}, [[]]]
    assert len({digest_of(value) for value in alike}) == len(alike)
    assert check_seal(sealed({"a": [1, "b"]})) == {"a": [1, "b"]}
    with pytest.raises(StateFormatError, match="holds a set"):
        digest_of({1})


# States of ranks ----------------------------------------------------------------------------------

KINDS = [("planned", 0), ("planned", 2), ("streamed", 0), ("streamed", 2)]


@pytest.mark.parametrize(("name", "workers"), KINDS)
def test_a_rank_state_with_anything_changed_is_refused(data, name, workers):
    state, expected = saved_after(7, data, name, workers)
    loader = new_loader(data, name, workers)
    accepted = []
    for what, mutated in mutations(state, 120 if workers else 300, seed=workers):
        start = time.process_time()
        try:
            loader.restore_state_rank(mutated)
        except (StateFormatError, StateMismatchError):
            assert loader.batches_drawn == 0, what
        else:
            accepted.append(what)
            assert hashes(loader, 4) == expected, what
            loader.close()
            loader = new_loader(data, name, workers)
        assert time.process_time() - start <= (1 if what not in accepted else 60), what
    # Without a digest it is a state as stock Energon has them; nothing else is let through.
    assert all(f".{SEAL}: drop" in what for what in accepted), accepted
    assert hashes(loader, 3) == hashes(new_loader(data, name, workers), 3)


@pytest.mark.parametrize("name", ["planned", "streamed"])
def test_what_the_loader_says_beside_its_workers_is_checked(data, name):
    state, _ = saved_after(7, data, name, workers=2)
    assert state.next_worker_id == 1
    first, second = state.worker_states
    for changed in (
        {"next_worker_id": 0},
        {"next_worker_id": 2},
        {"next_worker_id": True},
        {"micro_batch_size": 2},
        {"micro_batch_size": None},
        {"worker_states": []},
        {"worker_states": [first]},
        {"worker_states": [second, first]},
        {"worker_states": [first, first]},
        {"worker_states": [first, second, second]},
        {"worker_states": [first, dataclasses.replace(second, state=None)]},
        {"worker_states": [first, dataclasses.replace(second, offset=1)]},
        {"worker_states": (first, second)},
    ):
        with pytest.raises((StateFormatError, StateMismatchError)):
            new_loader(data, name, workers=2).restore_state_rank(
                dataclasses.replace(state, **changed)
            )


@pytest.mark.parametrize("name", ["planned", "streamed"])
@pytest.mark.parametrize("workers", [0, 2])
def test_states_of_different_steps_are_not_mixed(data, name, workers):
    states = [
        saved_after(batches, data, name, workers, rank=rank, ranks=2)[0]
        for rank, batches in enumerate((6, 8))
    ]
    for rank in (0, 1):
        loader = new_loader(data, name, workers, rank=rank, ranks=2)
        with pytest.raises(StateMismatchError, match=r"batches drawn: saved \[6, 8\], now 'the sa"):
            loader.restore_states(states)
        assert loader.batches_drawn == 0


def test_states_of_different_runs_are_not_mixed(data):
    states = [saved_after(6, data, rank=rank, ranks=2, seed=rank)[0] for rank in (0, 1)]
    with pytest.raises(StateMismatchError, match="rows drawn: .*take those of one save"):
        new_loader(data, rank=0, ranks=2).restore_states(states)


@pytest.mark.parametrize(("name", "workers"), KINDS)
def test_a_smaller_micro_batch_is_refused_for_the_states_of_ranks(data, name, workers):
    state, _ = saved_after(4, data, name, workers, batch_size=2)
    with pytest.raises(StateMismatchError, match="batch_size: saved 2, now 1"):
        new_loader(data, name, workers, batch_size=1).restore_state_rank(state)


@pytest.mark.parametrize(("name", "workers"), KINDS)
def test_another_option_is_a_mismatch(data, name, workers):
    state, expected = saved_after(4, data, name, workers)
    for options, field in (
        ({"encoder": {"packing": "sequential"}}, "packing: saved 'bin', now 'sequential'"),
        ({"encoder": {"seq_len": 64}}, "seq_len: saved 32, now 64"),
        ({"virtual_epoch_length": 4}, "datasets around the blend: .*EpochizeDataset"),
    ):
        with pytest.raises(StateMismatchError, match=field):
            new_loader(data, name, workers, **options).restore_state_rank(state)
    # No refusal has changed the state.
    same = new_loader(data, name, workers)
    same.restore_state_rank(state)
    assert hashes(same, 4) == expected


def test_a_planned_run_goes_on_with_or_without_virtual_epochs(data):
    """They are of the loader, and no rows depend on them."""
    state, expected = saved_after(4, data)
    loader = new_loader(data, virtual_epoch_length=8)
    loader.restore_states([state])
    assert hashes(loader, 4) == expected


WRONG = [3, "x", b"", [], {}, (), object(), FlexState(), [None], [{}], {"plan": {}}, [[]]]
WRONG += [SavableDataLoaderState(worker_states=None, next_worker_id=0, micro_batch_size=1)]
WRONG += [SavableDataLoaderState(worker_states=[3], next_worker_id=0, micro_batch_size=1)]
WRONG += [SavableDataLoaderState(worker_states=[{}], next_worker_id=0, micro_batch_size=1)]
TYPED = (StateFormatError, StateMismatchError, ConfigError)


@pytest.mark.parametrize("workers", [0, 2])
def test_objects_of_the_wrong_kind_are_refused(data, workers):
    for wrong in WRONG:
        loader = new_loader(data, workers=workers)
        for restore in (loader.restore_state_rank, loader.restore_states, loader.load_state_dict):
            with pytest.raises(TYPED):
                restore(wrong)
        assert loader.batches_drawn == 0
    with pytest.raises(ConfigError, match="1 of them None"):
        new_loader(data).restore_states(None)
    with pytest.raises(StateFormatError, match="NoneType is no data state"):
        new_loader(data).load_state_dict(None)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_loader_that_has_begun_is_not_restored(data, workers):
    state, _ = saved_after(4, data, workers=workers)
    loader = new_loader(data, workers=workers)
    take(loader, 1)
    with pytest.raises(ConfigError, match="before the first batch, in a new loader"):
        loader.restore_state_rank(state)
    assert hashes(loader, 1) == hashes(new_loader(data, workers=workers), 2)[1:]
