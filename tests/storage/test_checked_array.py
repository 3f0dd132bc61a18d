# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Arrays in cache files: read as they were written, or refused by the page that changed."""

import zlib

import numpy as np
import pytest

from energon_ext.errors import ConfigError
from energon_ext.storage.checked_array import CheckedArray, CheckedWriter, write_checksums
from energon_ext.storage.whole_file import open_whole


def write(path, *parts):
    with open_whole(path) as file:
        writer = CheckedWriter(file)
        for part in parts:
            writer.write(part)
        writer.close()
    return str(path)


@pytest.mark.parametrize("count", [0, 1, 1023, 1024, 1025, 5000])
@pytest.mark.parametrize("dtype", ["<u4", "<i8", "<f4"])
def test_an_array_is_read_as_numpy_reads_it(tmp_path, count, dtype):
    items = np.random.default_rng(0).integers(0, 1000, count).astype(dtype)
    path = write(tmp_path / "a", *np.array_split(items, 7))
    array = CheckedArray(path, dtype, count)
    assert len(array) == count
    assert np.array_equal(array[:], items)
    for where in (slice(3, 40), slice(-5, None), slice(2000, 1), np.arange(count)[::-3]):
        assert np.array_equal(CheckedArray(path, dtype)[where], items[where])
    if count:
        assert array[count - 1] == array[-1] == items[-1]
        assert len(array.first(count - 1)) == count - 1


def test_the_file_is_the_items_and_a_crc_of_each_page(tmp_path):
    items = np.arange(1500, dtype="<u4")
    path = write(tmp_path / "a", items)
    content = items.tobytes()
    sums = [zlib.crc32(content[:4096]), zlib.crc32(content[4096:])]
    assert (tmp_path / "a").read_bytes() == content + np.array(sums, "<u4").tobytes()
    assert len(CheckedArray(path, "<u4")) == 1500


@pytest.mark.parametrize("count", [1, 2047, 2048, 2049, 9000])
def test_checksums_may_be_in_a_file_of_their_own(tmp_path, count):
    items = np.arange(count, dtype="<u2")
    file, sums = tmp_path / "a.bin", tmp_path / "a.bin.sums"
    file.write_bytes(items.tobytes())
    write_checksums(file)
    pages = [items.tobytes()[at : at + 4096] for at in range(0, 2 * count, 4096)]
    assert sums.read_bytes() == np.array(list(map(zlib.crc32, pages)), "<u4").tobytes()
    array = CheckedArray(str(file), "<u2", count, is_apart=True)
    assert len(array) == count
    assert np.array_equal(array[:], items)
    sums.write_bytes(sums.read_bytes() + b"\0")
    with pytest.raises(ConfigError, match="a.bin.sums is missing or damaged.*was removed"):
        CheckedArray(str(file), "<u2", count, is_apart=True)
    assert not file.exists()


def test_only_the_pages_that_are_used_are_checked(tmp_path):
    items = np.arange(1, 4097, dtype="<u4")
    path = write(tmp_path / "a", items)
    content = bytearray((tmp_path / "a").read_bytes())
    content[2 * 4096 + 8 : 2 * 4096 + 12] = bytes(4)  # the item 2050
    (tmp_path / "a").write_bytes(content)
    array = CheckedArray(path, "<u4")
    for where in (0, slice(0, 2048), np.array([1, 4095, 2047]), slice(3072, None)):
        assert np.array_equal(array[where], items[where])
    for where in (2050, -1500, slice(2047, 2049), np.array([0, 3000])):
        (tmp_path / "a").write_bytes(content)
        with pytest.raises(
            ConfigError, match=rf"{path}: .* damaged .page 2 .* it was removed, and"
        ):
            CheckedArray(path, "<u4")[where]
        assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("change", [lambda c: c[:-4], lambda c: c + bytes(4), lambda c: c[:2]])
def test_a_file_of_another_size_is_refused(tmp_path, change):
    path = write(tmp_path / "a", np.arange(10, dtype="<u4"))
    (tmp_path / "a").write_bytes(change((tmp_path / "a").read_bytes()))
    with pytest.raises(ConfigError, match=f"{path}: .* damaged .it has"):
        CheckedArray(path, "<u4", 10)
