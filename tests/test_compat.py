# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The private names in ``energon_ext/compat.py`` are those of the installed libraries."""

import re
import signal
from pathlib import Path

import pytest
import torch.distributed as dist
from megatron.energon.epathlib import EPath, epath
from megatron.energon.flavors.webdataset.indexing import JoinIndexWriter
from megatron.energon.flavors.webdataset.itar_reader import JoinIndexFileITarReader
from megatron.energon.flavors.webdataset.structs import DatasetSubset
from megatron.energon.metadataset.metadataset_v2 import DatasetReference, Subset, SubsetRatioMixin
from megatron.energon.wrappers.repeat_dataset import RepeatDataset
from torch.utils.data import DataLoader, get_worker_info

from energon_ext import compat
from tests.streamed.numbers import Numbers
from tests.support import config, write_dataset

TEMPLATE = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"


def test_the_processes_of_a_loader_end_and_torch_does_not_watch_them_further():
    loader = DataLoader(range(8), num_workers=2, persistent_workers=True)
    compat.end_workers(loader)  # not begun
    batches = iter(loader)
    next(batches)
    workers = batches._workers
    assert len(workers) == 2 and not batches._shutdown and batches._worker_pids_set
    compat.end_workers(loader)
    assert [worker.exitcode for worker in workers] == [-signal.SIGKILL] * 2
    signal.raise_signal(signal.SIGCHLD)  # torch's handler raises if it still watches them
    assert batches._shutdown and not batches._worker_pids_set  # so that its deletion does nothing


class WorkerIds(list):
    """Item n is the number of the worker that Energon sees in a process that acts as n + 1."""

    def __getitem__(self, number):
        compat.set_worker(number + 1, get_worker_info().id, 3)
        return config(3).rank_worker_id()


def test_a_worker_process_acts_as_another_worker():
    assert list(DataLoader(WorkerIds(range(6)), None, num_workers=3)) == [1, 2, 0, 1, 2, 0]


def test_the_store_of_the_default_group_is_found(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        compat.default_store().set("name", "value")
        assert compat.default_store().get("name") == b"value"
        assert compat.default_store().check(["name"]) and not compat.default_store().check(
            ["other"]
        )
    finally:
        dist.destroy_process_group()


def test_a_named_dataset_has_the_url_of_its_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(epath, "NVDATASET_CACHE_DIR", EPath(str(tmp_path)))
    url = compat.url_of_data_service(EPath("dss://corpus@2/web/part-0"))
    assert re.fullmatch(f"msc://[a-z_]+{tmp_path}/corpus/2/web/part-0", url)


def test_a_reference_finds_its_path_and_uses_the_dataset_that_it_is_given(tmp_path):
    write_dataset(tmp_path / "web", ["text"])
    reference = DatasetReference(path="web")
    path = compat.resolve_path(reference, EPath(str(tmp_path / "mix.yaml")))
    assert str(path) == str(tmp_path / "web") == str(reference.path)

    class Loader:
        def get_datasets(self, **options):
            return f"the datasets of {options['split_part']}"

    compat.set_dataset(reference, Loader())
    options = {"training": True, "worker_config": config(), "split_part": "train"}
    assert reference.get_datasets(**options) == "the datasets of train"


def test_the_subset_around_an_entry_selects_from_that_of_the_entry():
    entry = SubsetRatioMixin(subset=Subset(range=("50%", "100%")))
    outer = DatasetSubset(range=(0.0, 0.5))
    assert compat.combine_subsets(entry, outer).compute_subset(100) == (
        50,
        75,
    )  # the first half of it
    assert compat.combine_subsets(entry, None).compute_subset(100) == (50, 100)


def test_a_join_index_says_which_joined_dataset_lacks_a_sample(tmp_path):
    path = EPath(str(tmp_path / "join_index.bin"))
    with JoinIndexWriter(path) as index:
        index.append((0, 0, 1024), (2, 512, 1024))
        index.append((0, 1024, 1024), (-1, -1, -1))
    reader = JoinIndexFileITarReader(path, 1, ["a.tar"], EPath(str(tmp_path)))
    assert [compat.joined_shard(reader, number) for number in (1, 0, 1)] == [-1, 2, -1]


def test_whole_readings_of_a_repeated_dataset_are_counted_and_saved():
    dataset = RepeatDataset(Numbers("web", 2), repeats=3, worker_config=config())
    values = iter(dataset)
    counts = [(next(values), compat.repetitions_read(dataset))[1] for _ in range(6)]
    assert counts == [0, 0, 1, 1, 2, 2]
    compat.set_repetitions_read(dataset, 1)
    assert dataset.save_state()["_repetition"] == 1


def test_a_client_of_a_store_stops_using_its_rust_client_and_says_how_often_it_tries():
    pytest.importorskip("boto3", reason="boto3 is not installed: pip install 'energon_ext[test]'")
    from multistorageclient import StorageClient, StorageClientConfig

    def client(retry=None, **rust):
        options = {"base_path": "corpus", "region_name": "us-east-1", **rust}
        profile = {"storage_provider": {"type": "s3", "options": options}}
        if retry:
            profile["retry"] = retry
        profiles = {"profiles": {"store": profile}}
        return StorageClient(StorageClientConfig.from_dict(profiles, "store"))

    with_rust = client({"attempts": 7, "delay": 0}, rust_client={"allow_http": True})
    assert compat.has_rust_client(with_rust)
    compat.drop_rust_client(with_rust)
    assert not compat.has_rust_client(with_rust)
    assert not compat.has_rust_client(client())
    assert compat.attempts_of(with_rust) == 7
    assert compat.attempts_of(client()) >= 1


def test_the_client_of_a_store_is_one_of_the_cached_clients():
    msc = pytest.importorskip("multistorageclient")
    client, _ = msc.resolve_storage_client("/tmp")
    assert any(each is client for each in compat.cached_clients())


def test_the_environment_of_a_chat_template_knows_the_tags_that_transformers_adds():
    library = pytest.importorskip("transformers.utils.chat_template_utils")
    environment = compat.jinja_environment(library, TEMPLATE)
    assert environment.parse(TEMPLATE).body
    assert {"tojson"} <= set(environment.filters) and "strftime_now" in environment.globals


def test_a_hugging_face_dataset_has_a_version_and_a_streamed_one_none():
    datasets = pytest.importorskip("datasets")
    ones, twos = (datasets.Dataset.from_dict({"number": [n] * 3}) for n in (1, 2))
    assert compat.version_of_dataset(ones) != compat.version_of_dataset(twos)
    assert re.fullmatch("[0-9a-f]{16}", compat.version_of_dataset(ones))
    assert compat.version_of_dataset(ones.to_iterable_dataset()) is None


def test_every_function_of_the_module_has_a_test_here():
    text = Path(__file__).read_text()
    functions = [name for name in vars(compat) if callable(vars(compat)[name]) and name.islower()]
    assert [name for name in functions if f"compat.{name}(" not in text] == []


def test_the_openai_client_tries_again_after_the_time_out_of_its_http_library():
    openai = pytest.importorskip("openai")
    timeout = compat.http_timeout_of(openai.DefaultAsyncHttpxClient())
    from openai._base_client import timeout_exceptions

    assert issubclass(timeout, timeout_exceptions())
