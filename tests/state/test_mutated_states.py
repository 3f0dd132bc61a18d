# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""A state with anything changed is refused with a typed error, and nothing begins."""

import json
import random
import time

import pytest
from megatron.energon.state import FlexState

from energon_ext import ConfigError, PackedTaskEncoder, StateMismatchError, get_train_dataset
from energon_ext.errors import StateFormatError
from energon_ext.state.schema import SEAL, seal
from energon_ext.tokenizers.tokenizers import ByteTokenizer
from tests.state.mutations import mutations
from tests.support import batch_hash, config, loader_for, take, write_mix, write_tokens


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    # Documents longer than a row, so that some are carried over; more documents than a buffer.
    write_tokens(folder / "short", [[n % 200] * (8 + n % 9) for n in range(1, 91)])
    write_tokens(folder / "long", [[n % 200] * 50 for n in range(1, 91)])
    mix = write_mix(folder / "both.yaml", [("short", 1), ("long", 1)])
    mix.write_text(mix.read_text().replace('"blend"', '"interleave"'))
    write_mix(folder / "short.yaml", [("short", 1)])
    return folder


def new_loader(data, name="both", workers=0, seed=0, **options):
    encoder = {"seq_len": 32, "packing_buffer_docs": 4, **options}
    dataset = get_train_dataset(
        data / f"{name}.yaml",
        worker_config=config(workers, seed=seed),
        batch_size=1,
        rows_per_step=4,
        task_encoder=PackedTaskEncoder(ByteTokenizer(), **encoder),
    )
    return loader_for(dataset)


def hashes(loader, count):
    return [batch_hash(batch) for batch in take(loader, count)]


@pytest.fixture(scope="module")
def cursors(data):
    """Cursors at the end of a step, within one, and with a retained source."""
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
    return {"both": [at_end, inside], "short": [retained]}


def check_refused(loader, state, error, what):
    """Check that a state is refused within a second."""
    start = time.process_time()
    with pytest.raises(error):
        loader.load_state_dict(state)
        pytest.fail(f"accepted: {what}")
    assert time.process_time() - start <= 1, what


@pytest.mark.parametrize(("name", "which"), [("both", 0), ("both", 1), ("short", 0)])
def test_a_cursor_with_any_change_is_refused_and_nothing_starts(data, cursors, name, which):
    loader = new_loader(data, name)
    at_start = loader.state_dict()
    for what, mutated in mutations(cursors[name][which], 400, seed=which):
        check_refused(loader, mutated, StateFormatError, what)
    assert loader.state_dict() == at_start
    assert hashes(loader, 6) == hashes(new_loader(data, name), 6)


def test_a_changed_and_resealed_cursor_is_valid_or_refused(data, cursors):
    """No other error occurs, and after a refusal nothing has begun."""
    content = {key: value for key, value in cursors["both"][1].items() if key != SEAL}
    loader = new_loader(data)
    at_start, refused = loader.state_dict(), 0
    for _, mutated in mutations(content, 200, seed=5):
        if SEAL in mutated:
            continue
        try:
            loader.load_state_dict(seal(mutated))
        except (StateFormatError, StateMismatchError):
            refused += 1
            assert loader.state_dict() == at_start
        else:
            loader = new_loader(data)
    assert refused > 100


def test_a_truncated_cursor_is_refused(data, cursors):
    text = json.dumps(cursors["both"][1])
    loader = new_loader(data)
    chance, mended_count = random.Random(0), 0
    for cut in chance.sample(range(1, len(text)), 150):
        with pytest.raises(ValueError):  # noqa: PT011
            json.loads(text[:cut])
        for mended in mended_texts(text[:cut]):
            if mended == cursors["both"][1]:
                continue  # only the last bracket was missing
            mended_count += 1
            check_refused(loader, mended, StateFormatError, cut)
        check_refused(loader, text[:cut], StateFormatError, cut)
    assert mended_count > 100
    assert hashes(loader, 2) == hashes(new_loader(data), 2)


def mended_texts(text):
    """Yield what a reader that closes open brackets would read from truncated text."""
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


def test_deep_nesting_and_huge_numbers_are_refused(data, cursors):
    deep = []
    for _ in range(5000):
        deep = [deep]
    for unbounded in (deep, 10**5000, float("nan")):
        state = {**cursors["both"][0], "done": unbounded}
        with pytest.raises(StateFormatError):
            new_loader(data).load_state_dict(state)


@pytest.mark.parametrize("wrong", [None, 3, "x", b"", [], {}, (), object(), FlexState(), [{}]])
def test_objects_of_the_wrong_kind_are_refused(data, wrong):
    loader = new_loader(data)
    with pytest.raises(StateFormatError):
        loader.load_state_dict(wrong)
    assert loader.batches_drawn == 0


# Intact states of other runs ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"seed": 1}, "seed: saved 0, now 1"),
        ({"seq_len": 64}, "seq_len: saved 32, now 64"),
        (
            {"packing": "sequential"},
            "packing: saved {'name': 'bin', .*, now {'name': 'sequential'}",
        ),
        ({"train_on_eos": False}, "train_on_eos: saved True, now False"),
        ({"seed": 2, "seq_len": 8}, "seed: saved 0, now 2; seq_len: saved 32, now 8"),
    ],
)
def test_an_intact_cursor_of_another_configuration_is_a_mismatch(data, cursors, options, field):
    loader = new_loader(data, **options)
    inside_a_step = cursors["both"][1]
    with pytest.raises(StateMismatchError, match=field):
        loader.load_state_dict(inside_a_step)
    assert loader.batches_drawn == 0
    assert hashes(loader, 2) == hashes(new_loader(data, **options), 2)


def test_changed_documents_are_a_mismatch_before_a_worker_starts(data, cursors, tmp_path):
    write_tokens(tmp_path / "short", [[n % 200] * (8 + n % 9) for n in range(1, 91)])
    write_tokens(tmp_path / "long", [[n % 200] * 51 for n in range(1, 91)])
    mix = write_mix(tmp_path / "both.yaml", [("short", 1), ("long", 1)])
    mix.write_text(mix.read_text().replace('"blend"', '"interleave"'))
    loader = new_loader(tmp_path, workers=2)
    with pytest.raises(StateMismatchError, match="long: tokens: saved 4500, now 4590"):
        loader.load_state_dict(cursors["both"][0])
    assert hashes(loader, 1) == hashes(new_loader(tmp_path), 1)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_started_loader_refuses_a_state(data, cursors, workers):
    loader = new_loader(data, workers=workers)
    take(loader, 1)
    with pytest.raises(ConfigError, match="before the first batch, in a new loader"):
        loader.load_state_dict(cursors["both"][0])
    assert hashes(loader, 1) == hashes(new_loader(data), 2)[1:]


def test_a_second_state_is_refused_and_the_first_is_kept(data, cursors):
    at_end, inside = cursors["both"]
    loader = new_loader(data)
    loader.load_state_dict(at_end)
    for second in (inside, at_end, None):
        with pytest.raises(ConfigError, match="before the first batch, in a new loader"):
            loader.load_state_dict(second)
        assert loader.state_dict() == at_end
    assert hashes(loader, 4) == hashes(new_loader(data), 12)[8:]
