# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Samples of tar files by number equal those that Energon reads, in any tar format."""

import contextlib
import gc
import os
import random
import resource
import tarfile

import pytest
from megatron.energon.epathlib import EPath
from megatron.energon.flavors.webdataset.itar_reader import ShardInfosITarReader
from megatron.energon.flavors.webdataset.metadata import WebdatasetMeta
from megatron.energon.wrappers.limit_dataset import LimitDataset

from energon_ext.encoders.load import load_split
from energon_ext.errors import ConfigError
from energon_ext.samples import shards
from energon_ext.samples.numbered import ALONE, guard_readers, loader_in
from energon_ext.samples.tar_reader import TarReader, plain_files
from tests.samples.vision import CRUDE, write_images
from tests.support import add_sample, prepare_shards

KINDS = {
    "plain": (tarfile.USTAR_FORMAT, "{n:06d}"),
    "folders": (tarfile.USTAR_FORMAT, "some/folder/{n:06d}"),
    "long names": (tarfile.GNU_FORMAT, "x" * 120 + "{n:06d}"),
    "prefix": (tarfile.USTAR_FORMAT, "f" * 90 + "/" + "{n:06d}" + "y" * 30),
    "pax": (tarfile.PAX_FORMAT, "größe-{n:06d}"),
}


def write_shards(folder, kind, count=15):
    """Write two shards; every sample has a text, and every third one an empty file."""
    tar_format, name = KINDS[kind]
    folder.mkdir()
    for shard in range(2):
        with tarfile.open(folder / f"shard_{shard}.tar", "w", format=tar_format) as tar:
            for n in range(shard * count, (shard + 1) * count):
                files = {"txt": f"text {n} ".encode() * (n * 97 % 200), "json": b"{}"}
                files |= {"none": b""} if n % 3 == 0 else {}
                add_sample(tar, name.format(n=n), files)
    return prepare_shards(folder, CRUDE)


def reader_of(folder, **options):
    meta = WebdatasetMeta.from_config(path=EPath(folder), split_part="train")
    return ShardInfosITarReader(EPath(folder), meta.shards, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_samples_read_in_any_order_equal_those_of_energon(tmp_path, kind, monkeypatch):
    monkeypatch.setattr(shards, "MAX_OPEN", 1)
    folder = write_shards(tmp_path / "data", kind)
    expected, reader = reader_of(folder), TarReader(reader_of(folder))
    numbers = random.Random(0).choices(range(30), k=50)
    for number in numbers:
        assert reader[number] == expected[number]
    is_plain = plain_files((folder / "shard_0.tar").read_bytes()[:2048]) is not None
    assert is_plain == (kind in ("plain", "folders"))


def test_readers_are_guarded_below_any_stage_of_a_users_encoder(tmp_path):
    """Some encoders add a stage to what `_load_dataset` returns, under which they are streamed."""
    folder = write_shards(tmp_path / "data", "plain")
    (entry,) = load_split(folder, "train", None, ())
    dataset = LimitDataset(entry.dataset.build(), 5, worker_config=ALONE)
    assert isinstance(loader_in(guard_readers(dataset)).join_readers[0], TarReader)


def test_energons_filters_apply(tmp_path):
    folder = write_shards(tmp_path / "data", "plain")
    options = {
        "part_filter": lambda ext: ext == "txt",
        "sample_filter": lambda key: key != "shard_0.tar/000007",
    }
    reader, expected = TarReader(reader_of(folder, **options)), reader_of(folder, **options)
    assert [reader[n] for n in range(30)] == [expected[n] for n in range(30)]
    assert reader[7] is None and set(reader[8]) & {"txt", "json"} == {"txt"}


def test_read_samples_are_not_kept_in_memory(tmp_path):
    reader = reader_of(write_shards(tmp_path / "data", "pax"))
    samples = TarReader(reader)
    for number in range(30):
        samples[number]
    assert not any(tar.members for tar in reader.itar_files_cache.values())


def test_a_truncated_shard_is_an_error(tmp_path):
    folder = write_images(tmp_path / "data", 20)
    reader = TarReader(reader_of(folder))
    shard = folder / "shard_000.tar"
    shard.write_bytes(shard.read_bytes()[:3000])
    with pytest.raises((ValueError, tarfile.TarError)):
        reader[15]


@contextlib.contextmanager
def open_files_limited_to(count):
    """Lower the limit of open files of this process."""
    before, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before, most))


def num_open_files():
    return len(os.listdir("/proc/self/fd"))


def test_many_sources_with_many_shards_stay_below_the_limit_of_open_files(tmp_path):
    """More sources of 20 shards than may be open: a quarter of all open files is for shards."""
    gc.collect()
    folder = write_images(tmp_path / "data", 20, shard_size=1)
    expected = [reader_of(folder)[number] for number in range(20)]
    before = num_open_files()  # other tests of this process may have left many
    limit = before + max(80, before)
    readers = [TarReader(reader_of(folder)) for _ in range(limit // 80 + 4)]
    with open_files_limited_to(limit):
        for number in random.Random(0).choices(range(20), k=60):
            assert all(reader[number] == expected[number] for reader in readers)
        assert num_open_files() <= before + limit // 4
    del readers
    gc.collect()
    assert num_open_files() == before


def test_too_many_open_files_are_named_with_the_limit(tmp_path):
    reader = TarReader(reader_of(write_images(tmp_path / "data", 1)))
    with open_files_limited_to(1), pytest.raises(ConfigError, match="too many files.*`ulimit -n`"):
        reader[0]
