# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Shards and JSONL files: changes are detected at a resume, missing or cut files are named."""

import json
import os
import shutil
import time

import numpy as np
import pytest
from megatron.energon.dataset_config import get_dataset_from_config
from megatron.energon.epathlib import EPath
from megatron.energon.flavors.crude import CrudeWebdataset
from megatron.energon.flavors.jsonl.crude_jsonl_dataset import CrudeJsonlDatasetFactory

from energon_ext import ConfigError, PackedTaskEncoder, StateMismatchError, get_train_dataset
from energon_ext.samples import stored_files
from energon_ext.samples.stored_files import fingerprint_files
from energon_ext.tokenizers.tokenizers import ByteTokenizer
from tests.support import TEXT_SAMPLE, config, loader_for, take, write_dataset, write_mix

TEXTS = [f"document number {number:03d}, and some more text. " for number in range(120)]
OTHERS = [text.replace("some", "much") for text in TEXTS]


def write_jsonl(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    CrudeJsonlDatasetFactory.prepare_dataset(EPath(path))


def write_web(path, texts, shard_size=30):
    shutil.rmtree(path, ignore_errors=True)
    write_dataset(path, texts, shard_size=shard_size)


def dataset_of(path, num_workers=0):
    return get_train_dataset(
        path,
        worker_config=config(num_workers),
        batch_size=1,
        shuffle_buffer_size=4,
        task_encoder=PackedTaskEncoder(ByteTokenizer(), 64, packing_buffer_docs=4),
    )


def new_loader(folder, num_workers=0):
    return loader_for(dataset_of(folder / "mix.yaml", num_workers))


def more_shards(folder):
    write_web(folder / "web", [*TEXTS, *OTHERS[:30]])


def other_shards(folder):
    write_web(folder / "web", TEXTS, shard_size=25)


def swapped_shards(folder):
    one, other = (folder / "web" / f"shard_00{number}.tar" for number in (1, 3))
    assert one.stat().st_size == other.stat().st_size
    one.rename(folder / "kept")
    other.rename(one)
    (folder / "kept").rename(other)


def other_fields(folder):
    path = folder / "web" / ".nv-meta" / "dataset.yaml"
    path.write_text(path.read_text().replace('"txt"', '"txt,json[title][0]"'))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prepared")
    write_web(folder / "web", TEXTS)
    write_jsonl(folder / "lines.jsonl", TEXTS)
    write_mix(folder / "mix.yaml", [("web", 1), ("lines.jsonl", 1)])
    return folder


@pytest.fixture
def folder(prepared, tmp_path):
    """A copy to change: prepared folders do not depend on their path."""
    return shutil.copytree(prepared, tmp_path, dirs_exist_ok=True)


@pytest.mark.parametrize(
    ("change", "source", "fields"),
    [
        (lambda folder: write_web(folder / "web", OTHERS), "web:train", {"sample"}),
        (swapped_shards, "web:train", {"sample"}),
        (more_shards, "web:train", {"documents", "tokens", "index", "sample"}),
        (lambda folder: write_jsonl(folder / "lines.jsonl", OTHERS), "lines.jsonl", {"sample"}),
    ],
)
def test_changed_documents_are_refused_naming_their_source(folder, change, source, fields):
    states = []
    for num_workers in (0, 1):
        loader = new_loader(folder, num_workers)
        take(loader, 3)
        states.append(loader.save_state_rank())
        loader.close()
    change(folder)
    for num_workers, state in enumerate(states):
        with pytest.raises(StateMismatchError) as refused:
            new_loader(folder, num_workers).restore_state_rank(state)
        assert {*refused.value.differences} == {f"{source}: {field}" for field in fields}


def test_a_folder_reports_the_fields_of_its_dataset_yaml(folder):
    other = {"text": "txt,json[title][0]", "__restore_key__": "json[id]"}
    content = json.dumps({"sample_type": TEXT_SAMPLE, "field_map": other})
    (folder / "web" / ".nv-meta" / "other.yaml").write_text(content)
    for name, fields in (("dataset.yaml", {"text": "txt"}), ("other.yaml", other)):
        factory = get_dataset_from_config(
            folder / "web", dataset_config=name, worker_config=config()
        )
        assert fingerprint_files(factory)["fields"] == [fields]


def test_a_folder_with_a_sample_loader_reports_no_fields(folder):
    meta = folder / "web" / ".nv-meta"
    (meta / "code.py").write_text(
        "import functools\n"
        "def read(sample, name): return {'text': sample[name]}\n"
        "load = functools.partial(read, name='txt')\n"
    )
    loaders = {"sample_loader": "code.py:load", "part_filter": ["txt"]}
    (meta / "dataset.yaml").write_text(json.dumps({"sample_type": TEXT_SAMPLE, **loaders}))
    factory = get_dataset_from_config(folder / "web", worker_config=config())
    assert "fields" not in fingerprint_files(factory)


@pytest.mark.parametrize("change", [None, other_shards, other_fields])
def test_the_same_documents_prepared_again_or_moved_resume(folder, change):
    loader = new_loader(folder)
    take(loader, 3)
    state = loader.save_state_rank()
    time.sleep(0.01)  # tar headers contain the time
    write_web(folder / "web", TEXTS)
    write_jsonl(folder / "lines.jsonl", TEXTS)
    if change is not None:
        change(folder)
    moved = folder.rename(folder.with_name(f"{folder.name}-moved"))
    again = new_loader(moved)
    again.restore_state_rank(state)
    take(again, 3)


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("web/shard_001.tar", os.remove, r"shard_001.tar: cannot be read \(No such file"),
        ("web/shard_001.tar.idx", os.remove, "shard_001.tar.idx: cannot be read"),
        (
            "web/shard_001.tar",
            lambda path: os.truncate(path, 9000),
            r"has 9000 bytes, needs",
        ),
        ("web/shard_001.tar", lambda path: os.truncate(path, 0), r"has 0 bytes, needs"),
        (
            "web/shard_001.tar.idx",
            lambda p: os.truncate(p, 99),
            "idx: is not an index of 30 samples",
        ),
    ],
)
def test_a_missing_or_cut_shard_is_named_while_building(folder, name, damage, message):
    damage(folder / name)
    with pytest.raises(ConfigError, match=message) as error:
        new_loader(folder)
    assert "\n" not in str(error.value)


def test_an_index_with_an_empty_line_is_an_error_naming_its_source(folder):
    path = folder / "lines.jsonl.idx"
    begins = np.fromfile(path, "<u8")
    begins[100] = begins[101]
    begins.tofile(path)
    with pytest.raises(ConfigError, match="changed since it was indexed"):
        new_loader(folder)


def only_lines(folder, lines):
    path = folder / "broken.jsonl"
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    CrudeJsonlDatasetFactory.prepare_dataset(EPath(path))
    write_mix(folder / "mix.yaml", [("broken.jsonl", 1)])
    return new_loader(folder)


def test_lines_that_are_not_json_are_skipped_and_reported_by_number(folder, caplog):
    lines = [b'{"text": "one"}', b'{"text": two}', b'{"text": "thr\xffe"}', b'{"text": "four"}']
    loader = only_lines(folder, lines)
    batches = take(loader, 1)
    text = " ".join(ByteTokenizer().decode(batch.tokens.flatten()) for batch in batches)
    assert "one" in text and "four" in text and "tw" not in text and "thr" not in text
    assert (
        "jsonl: 2 of 4 samples cannot be tokenized: 1, the first: Sample 1: JSONDecodeError ("
        in caplog.text
    )


def test_a_line_with_a_key_twice_is_skipped_and_the_key_named(folder, caplog):
    """Energon keeps the last of the two values in silence."""
    lines = [b'{"text": "one"}', b'{"text": "two", "id": 1, "text": "six"}', b'{"text": "four"}']
    loader = only_lines(folder, lines)
    text = "".join(ByteTokenizer().decode(batch.tokens.flatten()) for batch in take(loader, 1))
    assert "one" in text and "four" in text and "two" not in text and "six" not in text
    assert "1 of 3 samples cannot be tokenized, the first: Sample 1: the key 'text'" in caplog.text


def test_a_file_without_any_json_line_is_one_typed_error(folder):
    with pytest.raises(ConfigError, match="broken.jsonl: 100 documents in a row cannot be trained"):
        only_lines(folder, [b"{a}"] * 150)


@pytest.mark.parametrize("damage", [os.remove, lambda path: os.truncate(path, 5000)])
def test_tokenized_text_is_needed_only_at_the_next_start(folder, damage):
    loader = new_loader(folder)
    for number in range(4):
        damage(folder / "web" / f"shard_00{number}.tar")
    take(loader, 130)
    with pytest.raises(ConfigError, match="shard_00"):
        new_loader(folder)


def test_at_most_sixty_four_shards_are_inspected(tmp_path, monkeypatch):
    write_web(tmp_path / "web", [f"text {number}" for number in range(200)], shard_size=2)
    factory = CrudeWebdataset(
        EPath(tmp_path / "web"), split_part="train", training=True, worker_config=config()
    )
    map_file, mapped = stored_files.map_file, set()

    def mapping(path, num_bytes):
        mapped.add(path)
        return map_file(path, num_bytes)

    monkeypatch.setattr(stored_files, "map_file", mapping)
    assert fingerprint_files(factory)["files"] == 100
    assert len(mapped) == 2 * 64  # each with its index


def test_sizes_of_at_most_sixty_four_of_many_shards_are_asked_for(tmp_path, monkeypatch):
    write_web(tmp_path / "web", [f"text {number}" for number in range(200)], shard_size=2)
    factory = CrudeWebdataset(
        EPath(tmp_path / "web"), split_part="train", training=True, worker_config=config()
    )
    exact = fingerprint_files(factory)
    monkeypatch.setattr(stored_files, "_MANY_FILES", 99)
    file_at, asked = stored_files.file_at, []
    monkeypatch.setattr(stored_files, "file_at", lambda path: asked.append(path) or file_at(path))
    found = fingerprint_files(factory)
    assert len(asked) == 64
    assert abs(found.pop("bytes") - exact.pop("bytes")) < 10_240 * 100
    assert {key for key in exact if exact[key] != found[key]} == {"index"}
    before = fingerprint_files(factory)
    os.truncate(asked[0], os.path.getsize(asked[0]) + 512)
    assert fingerprint_files(factory)["index"] != before["index"]
    (tmp_path / "web" / "shard_007.tar.idx").unlink()
    with pytest.raises(ConfigError, match="shard_007.tar.idx: does not exist; copy it again, or"):
        fingerprint_files(factory)
