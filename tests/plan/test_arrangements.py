# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Orders of documents that are not random, against lists sorted by Python."""

import json
import random
from collections import defaultdict

import numpy as np
import pytest
from megatron.energon import DefaultTaskEncoder

from energon_ext import (
    DynamicBlendMixin,
    ExactDataLoader,
    PackedTaskEncoder,
    get_train_dataset,
)
from energon_ext.batch.columns import Column
from energon_ext.encoders import plan_mix
from energon_ext.errors import ConfigError, StateFormatError, StateMismatchError
from energon_ext.plan import packed_rows
from energon_ext.prepare.token_writer import TokenWriter
from energon_ext.state.schema import seal
from energon_ext.tokenizers.tokenizers import ByteTokenizer
from energon_ext.tokens.reader import DocumentReader
from tests.support import config, take, write_dataset, write_mix

COUNT = 40
#: Every document begins with its number.
LEVELS = np.random.default_rng(1).integers(-5, 6, COUNT).tolist()


def write_levels(prefix, levels=LEVELS):
    writer = TokenWriter(prefix, 300, {"level": Column("int32", per="document")})
    for number, level in enumerate(levels):
        tokens = [10 + number, *range(60, 60 + number % 7)]
        writer.write(np.array(tokens), columns={"level": level})
    columns = {"level": Column("int32", per="document").to_json()}
    writer.close({"tokenizer": ByteTokenizer().fingerprint(), "columns": columns})


def mix_with(path, order, **fields):
    write_mix(path, [("web", 1)])
    content = json.loads(path.read_text())
    (entry,) = content["splits"]["train"]["blend"]
    entry.update({} if order is None else {"order": order}, **fields)
    path.write_text(json.dumps(content))
    return path


def loader_of(mix, rank=0, ranks=1, packing="sequential"):
    encoder = PackedTaskEncoder(ByteTokenizer(), 16, packing=packing, packing_buffer_docs=4)
    return ExactDataLoader(
        get_train_dataset(
            mix,
            worker_config=config(0, rank, ranks),
            batch_size=4 // ranks,
            task_encoder=encoder,
        )
    )


@pytest.fixture
def begun(monkeypatch):
    """The documents that have begun, in the order of their rows: lists by visit."""
    found = defaultdict(list)
    read = DocumentReader.read_rows

    def record(self, rows):
        for numbers, starts, _, visits, *_ in rows:
            for number, start, visit in zip(numbers, starts, visits):
                # A row may end with the first token of a document, as a label.
                if not start and found[visit][-1:] != [number]:
                    found[visit].append(number)
        return read(self, rows)

    monkeypatch.setattr(DocumentReader, "read_rows", record)
    return found


def read_epochs(begun, mix, epochs):
    loader = loader_of(mix)
    while len(begun[epochs]) < 5:  # copies of a document may wait for other documents
        take(loader, 1)
    return [begun[epoch] for epoch in range(epochs)]


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("stored", list(range(COUNT))),
        ({"by": "level"}, sorted(range(COUNT), key=lambda n: LEVELS[n])),
        ({"by": "level", "descending": True}, sorted(range(COUNT), key=lambda n: -LEVELS[n])),
        ({"by": "length"}, sorted(range(COUNT), key=lambda n: n % 7)),
    ],
)
def test_sequential_packing_keeps_an_order_exactly_in_every_epoch(tmp_path, begun, order, expected):
    write_levels(tmp_path / "web")
    assert read_epochs(begun, mix_with(tmp_path / "mix.yaml", order), 3) == [expected] * 3


def test_buckets_are_in_order_and_random_within(tmp_path, begun):
    write_levels(tmp_path / "web")
    mix = mix_with(tmp_path / "mix.yaml", {"by": "level", "buckets": 4})
    epochs = read_epochs(begun, mix, 3)
    ranked = sorted(range(COUNT), key=lambda n: LEVELS[n])
    for epoch in epochs:
        for bucket in range(4):
            part = slice(bucket * 10, bucket * 10 + 10)
            assert sorted(epoch[part]) == sorted(ranked[part]) and epoch[part] != ranked[part]
    assert epochs[0] != epochs[1] != epochs[2]


def test_best_fit_packing_takes_its_buffers_in_order(tmp_path, begun, monkeypatch):
    """A document moves by at most the documents of one buffer."""
    monkeypatch.setattr(packed_rows, "_FIRST_DOCS", 8)
    monkeypatch.setattr(plan_mix, "LEAST_BUFFER_DOCS", 8)
    monkeypatch.setattr(plan_mix, "MAX_BUFFER_DOCS", 8)
    write_levels(tmp_path / "web")
    mix = mix_with(tmp_path / "mix.yaml", {"by": "level"})
    take(loader_of(mix, packing="bin"), 20)
    ranked = sorted(range(COUNT), key=lambda n: LEVELS[n])
    moved = [abs(place - ranked.index(number)) for place, number in enumerate(begun[0])]
    assert 0 < max(moved) <= 16


@pytest.mark.parametrize("seed", range(4))
def test_a_change_takes_effect_at_the_next_epoch(tmp_path, begun, seed):
    """Every visit has every document once, in the order that the epoch began with."""
    write_levels(tmp_path / "web")
    ranked = sorted(range(COUNT), key=lambda n: LEVELS[n])
    orders = {
        "random": None,
        "stored": [*range(COUNT)],
        "by": ranked,
        "length": sorted(range(COUNT), key=lambda n: n % 7),
    }
    draw, state, seen = random.Random(seed), None, set()
    while len(begun[6]) < 5:
        name = draw.choice([*orders])
        order = {"by": {"by": "level"}, "length": {"by": "length"}}.get(name, name)
        loader = loader_of(mix_with(tmp_path / "mix.yaml", order))
        if state is not None:
            loader.load_state_dict(state)
        take(loader, draw.randint(1, 4))
        state = json.loads(json.dumps(loader.state_dict()))
    for visit in range(6):
        assert sorted(begun[visit]) == [*range(COUNT)]
        seen.update(name for name, expected in orders.items() if begun[visit] == expected)
    assert len(seen) > 1


def test_an_epoch_is_not_continued_in_the_order_of_other_values(tmp_path):
    write_levels(tmp_path / "web")
    mix = mix_with(tmp_path / "mix.yaml", {"by": "level"})
    loader = loader_of(mix)
    take(loader, 2)
    state = loader.state_dict()
    write_levels(tmp_path / "web", LEVELS[::-1])
    with pytest.raises(StateMismatchError, match="order: level"):
        loader_of(mix).load_state_dict(state)


@pytest.mark.parametrize(
    ("order", "reason"),
    [
        ("sorted", "'sorted' found; random, stored, or the column to sort by"),
        ({"by": "rank"}, "web has no 'rank' of each document to sort by; it has length, level"),
        ({"by": "level", "down": True}, "no field 'down'; it has buckets, by, descending"),
        ({"by": "level", "buckets": 0}, "order.buckets: 0 found"),
        ({"by": "level", "descending": 1}, "descending: 1 found, true or false is needed"),
        ({"descending": True}, "or the column to sort by"),
    ],
)
def test_a_field_that_is_no_order_is_refused(tmp_path, order, reason):
    write_levels(tmp_path / "web")
    with pytest.raises(ConfigError, match=reason):
        loader_of(mix_with(tmp_path / "mix.yaml", order))


def test_blocks_and_splices_have_no_other_order(tmp_path):
    write_levels(tmp_path / "web")
    with pytest.raises(ConfigError, match="order: web is spliced"):
        loader_of(mix_with(tmp_path / "mix.yaml", "stored", splice={"num_docs": 2}), packing="bin")


@pytest.mark.parametrize(
    "order",
    ["sorted", 3, {"by": "level"}, {"by": 3, "descending": False, "buckets": None, "digest": ""}],
)
def test_a_state_with_another_value_in_place_of_an_order_is_refused(tmp_path, order):
    write_levels(tmp_path / "web")
    mix = mix_with(tmp_path / "mix.yaml", {"by": "level"})
    loader = loader_of(mix)
    take(loader, 1)
    state = loader.state_dict()
    state["plan"]["sources"]["web"]["rows"]["order"] = order
    with pytest.raises(StateFormatError):
        loader_of(mix).load_state_dict(seal(state))


def test_an_entry_takes_precedence_over_one_around_it(tmp_path, begun):
    write_levels(tmp_path / "web")
    mix_with(tmp_path / "inner.yaml", "random")
    write_mix(tmp_path / "mix.yaml", [("inner.yaml", 1)])
    content = json.loads((tmp_path / "mix.yaml").read_text())
    content["splits"]["train"]["blend"][0]["order"] = "stored"
    (tmp_path / "mix.yaml").write_text(json.dumps(content))
    (found,) = read_epochs(begun, tmp_path / "mix.yaml", 1)
    assert sorted(found) == [*range(COUNT)] != found


def clear(value):
    """Empty all lists and mappings in a value."""
    if isinstance(value, (dict, list)):
        for each in value.values() if isinstance(value, dict) else value:
            clear(each)
        value.clear()


@pytest.mark.parametrize("order", [None, {"by": "level", "buckets": 4}])
def test_a_state_shares_nothing_with_the_run(tmp_path, order):
    write_levels(tmp_path / "web")
    loader = loader_of(mix_with(tmp_path / "mix.yaml", order))
    take(loader, 2)
    state = loader.state_dict()
    saved = json.dumps(state)
    clear(state)
    assert json.dumps(loader.state_dict()) == saved


def test_streamed_samples_have_no_order(tmp_path):
    write_dataset(tmp_path / "web", ["a", "b"])

    class Streaming(DynamicBlendMixin, DefaultTaskEncoder):
        plan_samples = False

    mix = mix_with(tmp_path / "mix.yaml", "stored")
    with pytest.raises(ConfigError, match="order: samples are streamed in Energon's own order"):
        get_train_dataset(mix, worker_config=config(), batch_size=1, task_encoder=Streaming())


@pytest.mark.parametrize(
    "fields", [{"max_epochs": 1}, {"order": "stored"}, {"block_docs": 1}, {"loss_weight": 2}]
)
def test_an_encoder_without_the_mixin_refuses_fields_of_entries(tmp_path, fields):
    write_dataset(tmp_path / "web", ["a", "b"])
    mix = mix_with(tmp_path / "mix.yaml", **{"order": None, **fields})
    with pytest.raises(ConfigError, match=rf"blend\[0\] \(web\)\.{[*fields][0]}: this TaskEncoder"):
        get_train_dataset(
            mix, worker_config=config(), batch_size=1, task_encoder=DefaultTaskEncoder()
        )


def test_token_files_are_read_as_stored_with_energons_own_field(tmp_path, begun):
    write_levels(tmp_path / "web")
    mix = mix_with(tmp_path / "mix.yaml", None, shuffle_over_epochs_multiplier=None)
    assert read_epochs(begun, mix, 2) == [[*range(COUNT)]] * 2


def test_samples_are_read_as_stored_with_energons_own_field(tmp_path):
    texts = [f"text {number:02d}" for number in range(COUNT)]
    write_dataset(tmp_path / "web", texts)
    write_mix(tmp_path / "mix.yaml", [("web", 1)])
    content = json.loads((tmp_path / "mix.yaml").read_text())
    content["splits"]["train"]["blend"][0]["shuffle_over_epochs_multiplier"] = None
    (tmp_path / "mix.yaml").write_text(json.dumps(content))
    found = "".join(
        ByteTokenizer().decode(batch.tokens.numpy())
        for batch in take(loader_of(tmp_path / "mix.yaml"), 8)
    )
    places = [found.find(text) for text in texts[:30]]
    assert places == sorted(places) and -1 not in places[:20]
