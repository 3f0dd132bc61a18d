# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Samples of tar files by number are those that Energon reads, whatever wrote the files."""

import io
import random
import tarfile

import pytest
from megatron.energon.epathlib import EPath
from megatron.energon.flavors.webdataset.itar_reader import ShardInfosITarReader
from megatron.energon.flavors.webdataset.metadata import WebdatasetMeta

from energon_ext.samples import shards
from energon_ext.samples.tar_reader import TarReader, plain_files
from tests.samples.vision import CRUDE, prepare, write_images

KINDS = {
    "plain": (tarfile.USTAR_FORMAT, "{n:06d}"),
    "folders": (tarfile.USTAR_FORMAT, "some/folder/{n:06d}"),
    "long names": (tarfile.GNU_FORMAT, "x" * 120 + "{n:06d}"),
    "prefix": (tarfile.USTAR_FORMAT, "f" * 90 + "/" + "{n:06d}" + "y" * 30),
    "pax": (tarfile.PAX_FORMAT, "größe-{n:06d}"),
}


def write_shards(folder, kind, count=30):
    """Two shards; a sample has a text, and every third one an empty file."""
    tar_format, name = KINDS[kind]
    folder.mkdir()
    for shard in range(2):
        with tarfile.open(folder / f"shard_{shard}.tar", "w", format=tar_format) as tar:
            for n in range(shard * count, (shard + 1) * count):
                files = {"txt": f"text {n} ".encode() * (n * 97 % 200), "json": b"{}"}
                for ext, content in {**files, **({"none": b""} if n % 3 == 0 else {})}.items():
                    info = tarfile.TarInfo(f"{name.format(n=n)}.{ext}")
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))
    prepare(folder, CRUDE)
    return folder


def reader_of(folder, **options):
    meta = WebdatasetMeta.from_config(path=EPath(folder), split_part="train")
    return ShardInfosITarReader(EPath(folder), meta.shards, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_samples_read_in_any_order_equal_those_of_energon(tmp_path, kind, monkeypatch):
    monkeypatch.setattr(shards, "MOST_OPEN", 1)
    folder = write_shards(tmp_path / "data", kind)
    expected, reader = reader_of(folder), TarReader(reader_of(folder))
    numbers = random.Random(0).choices(range(60), k=100)
    for number in numbers:
        assert reader[number] == expected[number]
    is_plain = plain_files((folder / "shard_0.tar").read_bytes()[:2048]) is not None
    assert is_plain == (kind in ("plain", "folders"))


def test_filters_of_energon_hold(tmp_path):
    folder = write_shards(tmp_path / "data", "plain")
    options = {
        "part_filter": lambda ext: ext == "txt",
        "sample_filter": lambda key: key != "shard_0.tar/000007",
    }
    reader, expected = TarReader(reader_of(folder, **options)), reader_of(folder, **options)
    assert [reader[n] for n in range(60)] == [expected[n] for n in range(60)]
    assert reader[7] is None and set(reader[8]) & {"txt", "json"} == {"txt"}


def test_what_was_read_is_not_kept(tmp_path):
    reader = reader_of(write_shards(tmp_path / "data", "pax"))
    own = TarReader(reader)
    for number in range(60):
        own[number]
    assert not any(tar.members for tar in reader.itar_files_cache.values())


def test_a_shard_that_was_cut_is_an_error(tmp_path):
    folder = write_images(tmp_path / "data", 20)
    reader = TarReader(reader_of(folder))
    shard = folder / "shard_000.tar"
    shard.write_bytes(shard.read_bytes()[:3000])
    with pytest.raises((ValueError, tarfile.TarError)):
        reader[15]
