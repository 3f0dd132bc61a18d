# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Samples of tar files and lines in an object store are planned by number and equal local ones."""

import json

import pytest
from megatron.energon.epathlib import EPath, epath
from megatron.energon.flavors.jsonl.crude_jsonl_dataset import CrudeJsonlDatasetFactory

from energon_ext import ExactDataLoader
from energon_ext.errors import StoreError
from energon_ext.storage import range_reader
from energon_ext.tokens.file_set import open_token_files
from tests.samples.test_planned_samples import dataset_of, run, write
from tests.samples.vision import PackedCaptions, write_images
from tests.support import loader_for, take, write_tokens

pytest.importorskip("moto", reason="moto is not installed: pip install 'energon_ext[test]'")
pytest.importorskip("boto3", reason="boto3 is not installed: pip install 'energon_ext[test]'")


#: A corpus this small would be read ahead as a whole by default.
FEW_AHEAD = {"read_ahead_bytes": 2**17}


@pytest.fixture
def mixes(tmp_path, store):
    """The same metadataset of images in a local folder and in the store."""
    write_images(tmp_path / "data" / "photos", 30)
    entry = {"path": "photos", "weight": 1, "subflavors": {"kind": "photo"}}
    local = write(tmp_path / "data" / "mix.yaml", {"blend": [entry]})
    store.put(tmp_path / "data", tmp_path.name)
    return local, f"msc://store/{tmp_path.name}/mix.yaml"


@pytest.mark.parametrize("client", [pytest.param("boto3", marks=pytest.mark.nightly), "rust"])
@pytest.mark.parametrize("encoder", [None, pytest.param(PackedCaptions, marks=pytest.mark.nightly)])
def test_stored_rows_equal_local_rows_on_any_ranks_and_workers(mixes, encoder):
    local, stored = mixes
    options = {"loader_options": FEW_AHEAD}
    if encoder is not None:
        options["encoder"] = encoder()
    expected, _ = run(local, 4, **options)
    assert run(stored, 2, 2, 1, **options)[0] == expected[:2]
    _, after_two = run(local, 2, **options)  # and then its files move to the store
    assert run(stored, 2, state=after_two, **options)[0] == expected[2:]


def test_samples_of_later_batches_are_prefetched(mixes, store):
    _, stored = mixes
    asked = {}
    for ahead in (0, 8):
        dataset = dataset_of(stored)
        (reader,) = dataset.batches.readers
        row_bytes = reader.row_bytes * dataset.run.topology.batch_rows
        loader = ExactDataLoader(dataset, read_ahead_bytes=ahead * row_bytes, read_requests=4)
        store.requests.clear()
        take(loader, 1)
        range_reader.range_reader().run_all([lambda: None] * 8)  # queued after the reads
        asked[ahead] = len(store.asked("GET", ".tar"))
        loader.close()
    assert asked[8] > 3 * asked[0] > 0


def test_the_bytes_of_a_row_are_those_of_all_its_samples(mixes):
    _, stored = mixes
    (one,) = dataset_of(stored).batches.readers
    (several,) = dataset_of(stored, encoder=PackedCaptions()).batches.readers
    assert several.row_bytes > 2 * one.row_bytes > 0  # about 15 of 40 positions per sample


def test_a_failing_store_is_a_one_line_error_and_samples_resume(mixes, store):
    local, stored = mixes
    _, state = run(local, 2)
    resumed = loader_for(dataset_of(stored), **FEW_AHEAD)
    store.fault = "down"
    range_reader.use_requests(16)
    resumed.load_state_dict(state)
    with pytest.raises(StoreError, match=r"shard_00.\.tar: cannot be read after up to 2 attempts"):
        next(iter(resumed))
    store.fault = None
    again, _ = run(stored, 1, state=state, loader_options=FEW_AHEAD)
    assert again == run(local, 1, state=state)[0]


def test_json_lines_in_a_store_give_the_rows_of_the_local_file(store, tmp_path):
    lines = tmp_path / "data" / "captions.jsonl"
    lines.parent.mkdir()
    texts = [json.dumps({"caption": "caption " + "0" * (n % 7) + str(n)}) for n in range(50)]
    lines.write_text("".join(f"{text}\n" for text in texts))
    CrudeJsonlDatasetFactory.prepare_dataset(EPath(lines))
    entry = {"path": "captions.jsonl", "subflavors": {"caption": True}}
    local = write(tmp_path / "data" / "mix.yaml", entry)
    store.put(tmp_path / "data", tmp_path.name)
    stored = f"msc://store/{tmp_path.name}/mix.yaml"
    expected, state = run(local, 6, loader_options=FEW_AHEAD)
    assert run(stored, 3, 2, 1, loader_options=FEW_AHEAD)[0] == expected[:3]
    after, _ = run(local, 6, state=state, loader_options=FEW_AHEAD)
    assert run(stored, 6, state=state, loader_options=FEW_AHEAD)[0] == after


def test_a_named_dataset_in_a_store_gives_the_rows_of_its_folder(store, tmp_path, monkeypatch):
    cache = f"msc://store/{tmp_path.name}"
    monkeypatch.setattr(epath, "NVDATASET_CACHE_DIR", EPath(cache))
    write_images(tmp_path / "corpus" / "2" / "photos", 30)
    write_tokens(tmp_path / "corpus" / "2" / "tokens" / "web", [[65] * (5 + n) for n in range(30)])
    local = write(tmp_path / "corpus" / "2" / "photos.yaml", {"path": "photos"})
    store.put(tmp_path / "corpus", f"{tmp_path.name}/corpus")
    options = {"loader_options": FEW_AHEAD}
    expected, _ = run(local, 2, **options)
    assert run("dss://corpus@2/photos.yaml", 2, **options)[0] == expected
    assert len(open_token_files("dss://corpus@2/tokens")) == 30
