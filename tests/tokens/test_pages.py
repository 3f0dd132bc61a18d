# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Of a large index, only the pages that a plan needs come into memory, many at a time."""

import ctypes
import mmap
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from energon_ext.storage import file_map
from energon_ext.storage.file_map import SMALL_BYTES, Pages, map_file
from energon_ext.tokens import lookup
from energon_ext.tokens.file_set import LARGE_TOKENS, TokenFiles, open_token_files
from energon_ext.tokens.index import read_pair, write_index
from tests.support import write_tokens

CHECKOUT = Path(__file__).parents[2]
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


def test_adjacent_pages_are_read_with_one_request(numbers, monkeypatch):
    items, advised = mmap.PAGESIZE // 4, []
    monkeypatch.setattr(Pages, "_request", lambda self, *arguments: advised.append(arguments))
    Pages(numbers).request(items * np.array([1, 2, 3, 7]))
    assert [stop - first for first, stop in advised] == [3, 1]


def test_a_page_is_requested_once(numbers, monkeypatch):
    pages, advised = Pages(numbers), []
    monkeypatch.setattr(Pages, "_request", lambda self, *arguments: advised.append(arguments))
    for wanted in ([0, 1, 2], [0, 7], [10**6]):
        pages.request(np.array(wanted))
    assert len(advised) == 2


def test_a_small_array_is_left_to_the_kernel(tmp_path, monkeypatch):
    np.arange(10, dtype=np.int32).tofile(tmp_path / "few")
    monkeypatch.setattr(Pages, "_request", None)
    Pages(map_file(str(tmp_path / "few"), 40).view(np.int32)).request(np.arange(10))


def test_documents_of_a_large_source_are_read_without_their_neighbours(tmp_path):
    lengths = np.full(LARGE_TOKENS // 1000 + 1, 1000, np.int32)
    prefix, size = tmp_path / "large", 2 * int(lengths.sum())
    write_index(f"{prefix}.idx", np.dtype("<u2"), lengths)
    np.arange(size // 2).astype("<u2").tofile(f"{prefix}.bin")
    files = TokenFiles([prefix])
    drop(f"{prefix}.bin")
    chosen = list(range(7, len(lengths), len(lengths) // 40))
    tokens = files.read(chosen, [0] * len(chosen), [1000] * len(chosen))["tokens"]
    content = map_file(f"{prefix}.bin", size)
    wanted = {(2000 * n + byte) // mmap.PAGESIZE for n in chosen for byte in (0, 1999)}
    assert wait_for(lambda: resident(content)[sorted(wanted)].all())
    for number, found in zip(chosen, tokens):
        first = 1000 * number
        assert found.tolist() == np.arange(first, first + 1000).astype("<u2").tolist()
    assert resident(content).sum() <= 2 * len(wanted)


def test_the_last_page_of_an_array_is_requested(numbers, monkeypatch):
    advised = []
    monkeypatch.setattr(Pages, "_request", lambda self, *arguments: advised.append(arguments))
    Pages(numbers).request(np.array([len(numbers) - 1]))
    ((first, stop),) = advised
    assert (first, stop) == (
        4 * len(numbers) // mmap.PAGESIZE - 1,
        4 * len(numbers) // mmap.PAGESIZE,
    )


def test_a_file_is_unmapped_with_its_last_array(tmp_path):
    path = tmp_path / "few"
    path.write_bytes(bytes(range(40)))
    part = map_file(str(path), 40)[10:20]
    assert str(path) in Path("/proc/self/maps").read_text()
    assert part.tolist() == [*range(10, 20)]
    del part
    assert str(path) not in Path("/proc/self/maps").read_text()


def test_the_lengths_of_a_plan_are_requested_from_a_large_index(tmp_path, monkeypatch):
    """3000 lengths of four bytes, after a header of 34, are on three pages."""
    write_tokens(tmp_path / "web", [[n] for n in range(3000)])
    advised = []
    monkeypatch.setattr(Pages, "_request", lambda self, *arguments: advised.append(arguments))
    monkeypatch.setattr(file_map, "SMALL_BYTES", 0)
    for small_bytes, is_large in ((12_001, False), (12_000, True)):
        monkeypatch.setattr(lookup, "SMALL_BYTES", small_bytes)
        files = open_token_files(tmp_path / "web")
        assert files.is_large == is_large
        files.request(np.array([0, 2999]))
        assert len(advised) == 2 * is_large


def test_as_many_sequences_as_documents_may_be_spread_unevenly(tmp_path):
    """The first of two documents has both sequences. No check has looked at the index before."""
    write_tokens(tmp_path / "web", [[1], [2, 3]])
    with open(tmp_path / "web.idx", "r+b") as file:
        file.seek(-24, os.SEEK_END)
        file.write(np.array([0, 2, 2], "<i8").tobytes())
    pair = read_pair(str(tmp_path / "web"))
    assert pair.one_sequence_each is None and pair.sequences == pair.documents == 2
    assert lookup.document_lengths(pair, np.arange(2)).tolist() == [3, 0]


FIRST_ROWS = """
import sys
import numpy as np
from energon_ext.packing import BestFitPacker
from energon_ext.plan.order import EpochOrder
from energon_ext.plan.packed_rows import PackedRows
from energon_ext.tokens.file_set import open_token_files
from tests.tokens.test_pages import map_whole, resident

prefix, block = sys.argv[1], int(sys.argv[2])
files = open_token_files(prefix)
order = EpochOrder(len(files), "large", block=block, mixed=64)
packer = BestFitPacker(8192)
rows = PackedRows(files, source="large", packer=packer, order=order, buffer_docs=4096)
taken = rows.take(512)
assert taken.num_tokens > 0.99 * 512 * 8192
pieces = [piece for row in range(512) for piece in taken.contents(row)]
files.read(*map(list, zip(*pieces)))
print(resident(map_whole(prefix + ".idx")).mean())
"""


def map_whole(path):
    return map_file(str(path), os.path.getsize(path))


@pytest.mark.nightly
@pytest.mark.parametrize(("block", "most"), [(1, 0.3), (256, 0.05)])
def test_the_first_rows_of_a_large_source_read_a_part_of_its_index(tmp_path, block, most):
    """2e7 documents; one rank plans and reads 512 rows of 8192 positions."""
    documents, prefix = 2 * 10**7, tmp_path / "large"
    lengths = np.random.default_rng(0).lognormal(6.2, 1.0, documents).clip(8, 60_000).astype("<i4")
    write_index(f"{prefix}.idx", np.dtype("<u2"), lengths)
    with open(f"{prefix}.bin", "wb") as file:
        file.truncate(2 * int(lengths.sum(dtype=np.int64)))  # a sparse file
    command = [sys.executable, "-c", FIRST_ROWS, str(prefix), str(block)]
    for _ in range(2):  # the first start checks the whole index
        drop(f"{prefix}.idx")
        found = subprocess.run(command, capture_output=True, text=True, cwd=CHECKOUT)
        assert found.returncode == 0, found.stderr
    assert float(found.stdout.split()[-1]) <= most
