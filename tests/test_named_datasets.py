# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Versioned datasets, ``dss://NAME@VERSION/PATH``, give the rows of the folder they stand for."""

import json
import shutil

import pytest
from megatron.energon import DefaultTaskEncoder, TextSample, stateless
from megatron.energon.epathlib import EPath, epath

from energon_ext import (
    ConfigError,
    DynamicBlendMixin,
    PackedTaskEncoder,
    get_train_dataset,
    get_val_datasets,
)
from energon_ext.plan.lookup import find_blend
from energon_ext.storage import object_store
from energon_ext.streamed.blend import StreamedBlend
from energon_ext.tokenizers.tokenizers import ByteTokenizer
from tests.cli.command import energon_ext, error_line
from tests.samples.test_planned_samples import run, write
from tests.samples.vision import PackedCaptions, write_images
from tests.support import batch_hash, config, loader_for, take, write_dataset, write_tokens


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The folder of version 2 of the dataset ``corpus``, below NVDATASET_CACHE_DIR."""
    monkeypatch.setattr(epath, "NVDATASET_CACHE_DIR", EPath(tmp_path / "cache"))
    folder = tmp_path / "cache" / "corpus" / "2"
    folder.mkdir(parents=True)
    return folder


def write_sources(folder):
    """Write a source of each kind that has text or tokens; return their paths in the folder."""
    write_tokens(folder / "tokens" / "web", [[65 + n % 26] * (5 + n) for n in range(30)])
    (folder / "lines.jsonl").write_text(
        "".join(json.dumps({"text": f"line {n} " * (n + 1)}) + "\n" for n in range(20))
    )
    write_dataset(folder / "shards", [f"sample {n} " * (n + 1) for n in range(20)], shard_size=6)
    return ["tokens/web", "tokens/web.bin", "tokens", "tokens/w*", "lines.jsonl", "shards"]


def hashes(path, steps=4, state=None):
    """Return the hashes of some batches, and the state after them."""
    encoder = PackedTaskEncoder(ByteTokenizer(), seq_len=64)
    options = {"worker_config": config(), "batch_size": 2, "task_encoder": encoder}
    loader = loader_for(get_train_dataset(path, **options))
    if state is not None:
        loader.load_state_dict(state)
    return [batch_hash(batch) for batch in take(loader, steps)], loader.state_dict()


def test_each_kind_of_source_gives_the_rows_of_its_folder(cache, tmp_path):
    for number, source in enumerate(write_sources(cache)):
        local = write(tmp_path / f"local-{number}.yaml", {"path": str(cache / source)})
        named = write(tmp_path / f"named-{number}.yaml", {"path": f"dss://corpus@2/{source}"})
        expected, _ = hashes(local)
        assert hashes(named)[0] == expected, source


def test_a_metadataset_inside_a_named_dataset_continues_a_run_on_the_folder(cache):
    entries = [{"path": source, "weight": 1} for source in write_sources(cache)[3:]]
    local = write(cache / "mix.yaml", {"blend": entries})
    expected, _ = hashes(local, 8)
    _, state = hashes(local, 4)
    assert hashes("dss://corpus@2/mix.yaml", 4, state)[0] == expected[4:]


def test_the_cache_of_text_is_inside_the_dataset_and_found_again(cache, caplog):
    write_sources(cache)
    write(cache / "mix.yaml", {"path": "lines.jsonl"})
    expected, _ = hashes("dss://corpus@2/mix.yaml")
    (made,) = cache.glob(".energon_ext_cache/*")
    times = {file: file.stat().st_mtime_ns for file in made.rglob("*.bin")}
    assert times and hashes("dss://corpus@2/mix.yaml")[0] == expected
    assert {file: file.stat().st_mtime_ns for file in made.rglob("*.bin")} == times


@pytest.mark.parametrize("encoder", [None, PackedCaptions])
def test_samples_are_planned_by_number(cache, tmp_path, encoder):
    write_images(cache / "photos", 30)
    entry = {"weight": 1, "subflavors": {"kind": "photo"}}
    local = write(cache / "mix.yaml", {"blend": [{"path": "photos", **entry}]})
    options = {} if encoder is None else {"encoder": encoder()}
    expected, _ = run(local, 4, **options)
    assert run("dss://corpus@2/mix.yaml", 4, 2, 1, **options)[0] == expected
    outside = {"blend": [{"path": "dss://corpus@2/photos", **entry}]}
    read, _ = run(write(tmp_path / "outside.yaml", outside), 4, **options)
    assert [names_in(step) for step in read] == [names_in(step) for step in expected]


def names_in(step):
    """Return the names of samples, without random numbers, which differ with the source's key."""
    rows = [[row] if isinstance(row[0], str) else row for row in step]
    return [[sample[0] for sample in row] for row in rows]


class Streamed(DynamicBlendMixin, DefaultTaskEncoder[TextSample, TextSample, list, list]):
    """Reads its samples in Energon's order."""

    plan_samples = False
    decoder = None

    @stateless
    def batch(self, samples):
        return [sample.text for sample in samples]


def test_streamed_samples_are_those_of_the_folder(cache):
    write_sources(cache)
    local = write(cache / "mix.yaml", {"blend": [{"path": "shards", "weight": 1}]})
    read = []
    for path in (local, "dss://corpus@2/mix.yaml"):
        options = {"worker_config": config(), "batch_size": 2, "shuffle_buffer_size": None}
        dataset = get_train_dataset(path, task_encoder=Streamed(), **options)
        assert isinstance(find_blend(dataset), StreamedBlend)
        read.append(take(loader_for(dataset), 6))
    assert read[0] == read[1]


def test_validation_and_commands_take_the_path_of_a_named_dataset(cache):
    write_sources(cache)
    write(cache / "mix.yaml", {"blend": [{"path": "shards"}, {"path": "tokens"}]})
    path = "dss://corpus@2/mix.yaml"
    options = {"worker_config": config(), "batch_size": 2, "split_part": "train"}
    encoder = PackedTaskEncoder(ByteTokenizer(), seq_len=64)
    assert len(get_val_datasets(path, task_encoder=encoder, **options)) == 2
    assert energon_ext("tokenize", path, "--tokenizer", "bytes").exit_code == 0
    for command in ("plan", "peek"):
        named = energon_ext(command, path, "--tokenizer", "bytes", "--seq-length", 64)
        assert named.exit_code == 0, named.output


def test_two_named_datasets_and_a_folder_in_a_stock_metadataset(cache, tmp_path):
    write_sources(cache)
    shutil.copytree(cache / "shards", tmp_path / "shards")
    stock = {"__module__": "megatron.energon", "__class__": "MetadatasetV2"}
    entries = [{"path": "dss://corpus@2/shards", "weight": 1}, {"path": "shards", "weight": 1}]
    (tmp_path / "stock.yaml").write_text(
        json.dumps({**stock, "splits": {"train": {"blend": entries}}})
    )
    encoder = PackedTaskEncoder(ByteTokenizer(), seq_len=64)
    options = {"worker_config": config(), "batch_size": 2, "task_encoder": encoder}
    blend = find_blend(get_train_dataset(tmp_path / "stock.yaml", **options))
    keys = {"dss://corpus@2/shards:train", f"{tmp_path}/shards:train"}
    assert set(blend.sources) == keys


def test_a_path_without_the_folder_of_named_datasets_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(epath, "NVDATASET_CACHE_DIR", None)
    path = write(tmp_path / "mix.yaml", {"path": "dss://corpus@2/web"})
    with pytest.raises(ConfigError, match=r"mix.yaml: .*NVDATASET_CACHE_DIR is not set"):
        hashes(path)
    line = error_line(energon_ext("plan", "dss://corpus@2/mix.yaml", "--tokenizer", "bytes"))
    assert "NVDATASET_CACHE_DIR is not set" in line


def test_a_profile_of_a_local_folder_gives_the_rows_of_the_folder(tmp_path, monkeypatch):
    provider = {"type": "file", "options": {"base_path": str(tmp_path)}}
    profiles = {"profiles": {"disk": {"storage_provider": provider}}}
    (tmp_path / "msc.json").write_text(json.dumps(profiles))
    monkeypatch.setenv("MSC_CONFIG", str(tmp_path / "msc.json"))
    object_store.msc.shortcuts._reinitialize_after_fork()  # drop the clients of earlier tests
    entries = [{"path": source, "weight": 1} for source in write_sources(tmp_path)[3:]]
    expected, _ = hashes(write(tmp_path / "mix.yaml", {"blend": entries}))
    assert hashes("msc://disk/mix.yaml")[0] == expected
    write_images(tmp_path / "photos", 16)
    photos = write(tmp_path / "photos.yaml", {"path": "photos"})
    assert run("msc://disk/photos.yaml", 2)[0] == run(photos, 2)[0]
