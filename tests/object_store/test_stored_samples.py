# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Samples of tar files in an object store are planned by number and equal local ones."""

import logging

import pytest
from megatron.energon.epathlib import EPath, epath
from megatron.energon.flavors.jsonl.crude_jsonl_dataset import CrudeJsonlDatasetFactory

from energon_ext import ExactDataLoader
from energon_ext.errors import StoreError
from energon_ext.plan.lookup import find_blend
from energon_ext.storage import range_reader
from energon_ext.streamed.blend import StreamedBlend
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


def test_json_lines_in_a_store_are_streamed_with_a_logged_reason(store, tmp_path, caplog):
    lines = tmp_path / "folder" / "captions.jsonl"
    lines.parent.mkdir()
    lines.write_text('{"caption": "caption 1"}\n' * 9)
    CrudeJsonlDatasetFactory.prepare_dataset(EPath(lines))
    store.put(lines.parent, tmp_path.name)
    entry = {"path": f"msc://store/{tmp_path.name}/captions.jsonl", "subflavors": {"caption": True}}
    path = write(tmp_path / "mix.yaml", entry)
    with caplog.at_level(logging.INFO, "energon_ext"):
        assert isinstance(find_blend(dataset_of(path)), StreamedBlend)
    assert "are neither local nor tars in an object store" in caplog.text


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
