# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Of a large index, only the pages that a plan needs come into memory, many at a time."""

import ctypes
import mmap
import os
import time

import numpy as np
import pytest

from energon_ext.packing import BestFitPacker
from energon_ext.plan.order import EpochOrder
from energon_ext.plan.packed_rows import PackedRows
from energon_ext.storage.file_map import SMALL_BYTES, Pages, map_file
from energon_ext.tokens.file_set import TokenFiles
from energon_ext.tokens.index import write_index

LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]


def resident(array):
    """Return which pages of a mapped array are in memory, bool [pages]."""
    begin = array.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
    num_bytes = array.ctypes.data + array.nbytes - begin
    pages = ctypes.create_string_buffer(-(-num_bytes // mmap.PAGESIZE))
    assert LIBC.mincore(begin, num_bytes, pages) == 0
    return np.frombuffer(pages.raw, np.uint8) & 1 > 0


def drop(path):
    """Drop a file from the cache of the kernel; skip the test where that has no effect."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if resident(map_file(str(path), os.path.getsize(path))).any():
        pytest.skip("this file system keeps its files in memory")


def wait_for(is_done):
    for _ in range(6000):
        if is_done():
            return True
        time.sleep(0.01)
    return False


@pytest.fixture
def numbers(tmp_path):
    path = tmp_path / "numbers"
    np.arange(SMALL_BYTES // 2, dtype=np.int32).tofile(path)
    drop(path)
    return map_file(str(path), os.path.getsize(path)).view(np.int32)


def test_requested_pages_are_read_and_no_others(numbers):
    wanted = np.arange(0, len(numbers), len(numbers) // 100)[:100]
    pages = np.unique((numbers.ctypes.data % mmap.PAGESIZE + 4 * wanted) // mmap.PAGESIZE)
    Pages(numbers).request(wanted)
    assert wait_for(lambda: resident(numbers)[pages].all())
    assert numbers[wanted].tolist() == wanted.tolist()
    # Requests of neighbours are joined; these are far apart.
    assert resident(numbers).sum() <= 2 * len(pages)


def test_neighbouring_pages_are_read_with_one_request(numbers):
    items = mmap.PAGESIZE // 4
    Pages(numbers).request(np.array([0, 5 * items, 8 * items]))
    assert wait_for(lambda: resident(numbers)[:9].all())


def test_a_page_is_requested_once(numbers, monkeypatch):
    pages, advised = Pages(numbers), []
    monkeypatch.setattr(Pages, "_advise", lambda self, *arguments: advised.append(arguments))
    for wanted in ([0, 1, 2], [0, 7], [10**6]):
        pages.request(np.array(wanted))
    assert len(advised) == 2


def test_a_small_array_is_left_to_the_kernel(tmp_path, monkeypatch):
    np.arange(10, dtype=np.int32).tofile(tmp_path / "few")
    monkeypatch.setattr(Pages, "_advise", None)
    Pages(map_file(str(tmp_path / "few"), 40).view(np.int32)).request(np.arange(10))


@pytest.mark.nightly
def test_the_first_rows_of_a_large_source_read_a_part_of_its_index(tmp_path):
    """2e7 documents: 512 rows of 8192 positions need the lengths of a few thousand."""
    documents, prefix = 2 * 10**7, tmp_path / "large"
    lengths = np.random.default_rng(0).lognormal(6.2, 1.0, documents).clip(8, 60_000).astype("<i4")
    write_index(f"{prefix}.idx", np.dtype("<u2"), lengths)
    with open(f"{prefix}.bin", "wb") as file:
        file.truncate(2 * int(lengths.sum(dtype=np.int64)))  # a sparse file
    files = TokenFiles([prefix])
    drop(f"{prefix}.idx")
    rows = PackedRows(
        files,
        source="large",
        packer=BestFitPacker(8192),
        order=EpochOrder(documents, "large"),
        buffer_docs=4096,
    )
    taken = rows.take(512)
    planned = resident(map_file(f"{prefix}.idx", os.path.getsize(f"{prefix}.idx"))).mean()
    assert taken.num_tokens > 0.99 * 512 * 8192
    assert planned <= 0.3
    files.read(*map(list, zip(*[piece for row in range(512) for piece in taken.contents(row)])))
    read = resident(map_file(f"{prefix}.idx", os.path.getsize(f"{prefix}.idx"))).mean()
    print(f"{planned:.3f} of the index after planning, {read:.3f} after reading the rows")
    assert read <= 0.3
