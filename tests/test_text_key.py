# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Text under another key than ``text``: ``key`` of an entry, what it reads and where it cannot."""

import json

import megatron.energon
import pytest
from megatron.energon import Cooker, DefaultTaskEncoder
from megatron.energon.epathlib import EPath
from megatron.energon.metadataset.loader import load_dataset
from webdataset import ShardWriter

from energon_ext import (
    ConfigError,
    DynamicBlendMixin,
    PackedTaskEncoder,
    PromptTaskEncoder,
    SFTTaskEncoder,
    get_train_dataset,
)
from energon_ext.encoders.text import cook_text
from energon_ext.tokenizers.tokenizers import ByteTokenizer
from tests.cli.command import energon_ext, error_line
from tests.prepare.runs import read
from tests.samples.test_planned_samples import write
from tests.support import (
    CRUDE,
    config,
    loader_for,
    prepare_shards,
    take,
    write_dataset,
    write_tokens,
)

TEXTS = [f"document {number} " * (number + 1) for number in range(12)]
TITLES = [f"title {number}" for number in range(12)]


def write_lines(path, **fields):
    """Write a JSON Lines file; ``fields`` are lists of texts by key."""
    path.parent.mkdir(exist_ok=True)
    rows = [dict(zip(fields, values)) for values in zip(*fields.values())]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_members(folder, suffix):
    """Write a crude webdataset with the texts in members with a suffix."""
    folder.mkdir()
    with ShardWriter(f"{folder}/shard_%03d.tar", maxcount=50, verbose=0) as shards:
        for number, text in enumerate(TEXTS):
            content = json.dumps({"body": text}) if suffix == "json" else text
            shards.write({"__key__": f"{number:06d}", suffix: content.encode()})
    prepare_shards(folder, CRUDE)


def texts_of(path, encoder=None, steps=6, state=None):
    """Return the texts of all documents in some batches of one row, and the state after them."""
    encoder = encoder or PackedTaskEncoder(ByteTokenizer(), seq_len=256)
    loader = loader_for(
        get_train_dataset(path, worker_config=config(), batch_size=1, task_encoder=encoder)
    )
    if state is not None:
        loader.load_state_dict(state)
    rows = [batch.tokens.flatten().tolist() for batch in take(loader, steps)]
    return "".join(map(encoder.tokenizer.decode, rows)), loader.state_dict()


def mix_of(path, *entries):
    return write(path, {"blend": list(entries)})


def test_rows_are_those_of_the_same_text_under_the_usual_key(tmp_path):
    write_lines(tmp_path / "a" / "web.jsonl", text=TEXTS)
    write_lines(tmp_path / "b" / "web.jsonl", title=TITLES, content=TEXTS)
    usual, _ = texts_of(mix_of(tmp_path / "a" / "mix.yaml", {"path": "web.jsonl"}))
    named = {"path": "web.jsonl", "key": "content"}
    assert texts_of(mix_of(tmp_path / "b" / "mix.yaml", named))[0] == usual
    assert TEXTS[3] in usual
    outer = {"path": "inner.yaml", "key": "content"}  # a key applies to the sources below it
    mix_of(tmp_path / "b" / "inner.yaml", {"path": "web.jsonl"})
    assert texts_of(mix_of(tmp_path / "b" / "outer.yaml", outer))[0] == usual


@pytest.mark.parametrize(("suffix", "key"), [("json", "body"), ("body.txt", "body.txt")])
def test_a_key_names_a_field_of_json_or_a_member_of_a_tar(tmp_path, suffix, key):
    write_members(tmp_path / "web", suffix)
    found, _ = texts_of(mix_of(tmp_path / "mix.yaml", {"path": "web", "key": key}), steps=12)
    assert all(text in found for text in TEXTS)


def test_two_keys_of_one_file_are_two_sources_with_their_own_tokens(tmp_path):
    write_lines(tmp_path / "web.jsonl", title=TITLES, content=TEXTS)
    title, content = ({"path": "web.jsonl", "key": key} for key in ("title", "content"))
    path = mix_of(tmp_path / "mix.yaml", title, content)
    expected, _ = texts_of(path, steps=20)
    assert TITLES[3] in expected and TEXTS[3] in expected
    assert len(list(tmp_path.glob(".energon_ext_cache/*"))) == 2
    first, state = texts_of(path, steps=8)
    mix_of(path, content, title)  # their states stay theirs
    assert first + texts_of(path, steps=12, state=state)[0] == expected
    mix_of(path, content)
    assert TITLES[3] not in texts_of(path, state=state)[0]


def test_preparing_a_metadataset_reads_the_key(tmp_path):
    write_lines(tmp_path / "web.jsonl", title=TITLES, content=TEXTS)
    mix = mix_of(tmp_path / "mix.yaml", {"path": "web.jsonl", "key": "content"})
    command = ("prepare", tmp_path / "out", "--dataset", mix, "--split", "train", "--val", 0)
    assert energon_ext(*command, "--tokenizer", "bytes").exit_code == 0
    assert read(tmp_path / "out", "train") == TEXTS
    assert energon_ext("tokenize", mix, "--tokenizer", "bytes").exit_code == 0
    assert texts_of(mix)[0]  # the tokens of the command


@pytest.mark.parametrize(("fields", "missing"), [({"key": "body"}, "body"), ({}, "text")])
def test_a_key_that_no_sample_has_is_named(tmp_path, fields, missing):
    write_lines(tmp_path / "web.jsonl", content=TEXTS)
    path = mix_of(tmp_path / "mix.yaml", {"path": "web.jsonl", **fields})
    advice = "Give the field that has the text as `key` of the entry"
    with pytest.raises(ConfigError, match=rf"no `{missing}`; it has \['content'\].*{advice}"):
        texts_of(path)


@pytest.mark.parametrize(
    ("value", "kind"), [(7, "of type int"), (None, "null"), (["a"], "of type")]
)
def test_a_value_that_is_no_text_is_named(tmp_path, value, kind):
    write_lines(tmp_path / "web.jsonl", text=[value])
    with pytest.raises(ConfigError, match=f"`text` is {kind}.*; text is needed"):
        texts_of(mix_of(tmp_path / "mix.yaml", {"path": "web.jsonl"}))


class Own(DynamicBlendMixin, DefaultTaskEncoder):
    """A TaskEncoder of one's own."""

    cookers = [Cooker(cook_text)]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write_lines(folder / "web.jsonl", content=TEXTS)
    write_tokens(folder / "tokens", [[65] * 9])
    write_dataset(folder / "samples", TEXTS)
    write_dataset(folder / "others", TEXTS)
    return folder


JOIN = {
    "join": [{"path": "samples"}, {"path": "others"}],
    "joiner": {"__module__": "megatron.energon", "__class__": "TextSample"},
}


@pytest.mark.parametrize(
    ("entry", "encoder", "reason"),
    [
        ({"path": "tokens"}, PackedTaskEncoder, "tokens are token files, which have no fields"),
        (JOIN, PackedTaskEncoder, "the samples of a join are made by its joiner"),
        ({"path": "samples"}, PackedTaskEncoder, "the dataset.yaml of .*samples says where the"),
        ({"path": "web.jsonl"}, SFTTaskEncoder, "SFTTaskEncoder reads samples in its own way"),
        ({"path": "web.jsonl"}, PromptTaskEncoder, "PromptTaskEncoder reads samples in its own"),
        ({"path": "web.jsonl"}, Own, "Own reads samples in its own way"),
    ],
)
def test_a_key_without_effect_is_refused_with_its_place(data, entry, encoder, reason):
    path = mix_of(data / "mix.yaml", {**entry, "key": "content"})
    load_dataset(EPath(path)).prepare(split_part="train")  # writes the index of a join
    arguments = {PackedTaskEncoder: [64], SFTTaskEncoder: [64], Own: None}.get(encoder, [])
    encoder = encoder() if arguments is None else encoder(ByteTokenizer(), *arguments)
    place = r"mix.yaml: blend\[0\].*\.key: 'content' found, but"
    with pytest.raises(ConfigError, match=rf"{place} .*{reason}"):
        get_train_dataset(path, worker_config=config(), batch_size=1, task_encoder=encoder)


def test_a_stock_encoder_refuses_a_key(data):
    path = mix_of(data / "mix.yaml", {"path": "web.jsonl", "key": "content"})

    class Stock(DefaultTaskEncoder):
        cookers = [Cooker(cook_text)]

    options = {"worker_config": config(), "batch_size": 1, "task_encoder": Stock()}
    with pytest.raises(ConfigError, match=r"\.key: this TaskEncoder does not support"):
        megatron.energon.get_train_dataset(
            path, shuffle_buffer_size=None, max_samples_per_sequence=None, **options
        )


def test_chats_are_prepared_without_a_key(data):
    mix = mix_of(data / "chats.yaml", {"path": "web.jsonl", "key": "content"})
    command = ("prepare", data / "out", "--dataset", mix, "--split", "train", "--chat")
    line = error_line(energon_ext(*command, "--tokenizer", "bytes", "--chat-template", "plain"))
    assert ".key: 'content' found, but SFTTaskEncoder reads samples in its own way" in line


@pytest.mark.parametrize("key", [5, ""])
def test_a_key_is_text(data, key):
    path = mix_of(data / "mix.yaml", {"path": "web.jsonl", "key": key})
    with pytest.raises(ConfigError, match=rf"key: {key!r} found, the name of a field is needed"):
        texts_of(path)
