# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Map files as arrays without keeping them open.

A source may have 10 000 pairs in use at once. Before Python 3.13, ``mmap.mmap`` keeps a file
descriptor per map, and the usual limit is 1024; the kernel itself needs none.

Mapping a file that is too short raises. If a file is truncated while it is mapped, the first read
past its end kills the process with SIGBUS. Checking before every read is impossible, so data must
not be overwritten in place during a run.
"""

import ctypes
import mmap
import os
from collections.abc import Iterable
from typing import Any

import numpy as np

from energon_ext.data_files import open_descriptor
from energon_ext.errors import ConfigError

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_LIBC.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_FAILED = ctypes.c_void_p(-1).value


class _FileMap:
    """The memory of a mapped file, unmapped once no array refers to it any more."""

    __slots__ = ("_address", "_num_bytes", "_unmap")

    def __init__(self, path: str, num_bytes: int, is_whole: bool):
        file = open_descriptor(path)
        try:
            num_found = os.fstat(file).st_size
            if num_found < num_bytes or (is_whole and num_found != num_bytes):
                raise ConfigError(
                    f"{path}: has {num_found} bytes, needs {num_bytes}; it was truncated or "
                    f"replaced, copy it again."
                )
            address = _LIBC.mmap(None, num_bytes, mmap.PROT_READ, mmap.MAP_SHARED, file, 0)
        finally:
            os.close(file)
        if address == _FAILED:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), path)
        self._address, self._num_bytes = address, num_bytes
        self._unmap = _LIBC.munmap  # at exit, module globals may be gone before this object

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {
            "version": 3,
            "data": (self._address, True),
            "shape": (self._num_bytes,),
            "typestr": "|u1",
        }

    def __del__(self) -> None:
        if hasattr(self, "_unmap"):
            self._unmap(self._address, self._num_bytes)


def map_file(path: str, num_bytes: int, *, is_whole: bool = False) -> np.ndarray:
    """Map the first bytes of a file, uint8 [num_bytes], read-only.

    ConfigError if it is shorter or, with ``is_whole``, longer.
    """
    if num_bytes == 0:  # the kernel rejects empty maps
        return np.zeros(0, np.uint8)
    return np.asarray(_FileMap(path, num_bytes, is_whole))


#: Arrays below this size are left to the kernel, which reads around each page that is touched.
SMALL_BYTES = 1 << 24

#: Pages between two wanted ones up to which one request covers both.
_GAP = 1


def read_at_random(array: np.ndarray) -> None:
    """Tell the kernel that items of a mapped array are read here and there.

    Of a large array, it would otherwise read 128 kB around each item.
    """
    if array.nbytes >= SMALL_BYTES:
        begin = array.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
        _LIBC.madvise(begin, array.ctypes.data + array.nbytes - begin, mmap.MADV_RANDOM)


def request_slices(array: np.ndarray, slices: Iterable[slice]) -> None:
    """Request slices of a mapped array together, before they are read one after the other.

    Otherwise each page that is not in memory stops the process, and the kernel reads 128 kB or more
    around it: many times the bytes of a document of 2 kB.
    """
    first, item_bytes = array.ctypes.data, array.strides[0]
    for each in slices:
        begin = (first + each.start * item_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        _LIBC.madvise(begin, first + each.stop * item_bytes - begin, mmap.MADV_WILLNEED)


class Pages:
    """The pages of a mapped array, which can be requested many at a time before they are read.

    A page that is not in memory stops the process until it is read, 0.1 ms or more, one after the
    other. If the pages of many items are requested first, the kernel reads them in parallel. The
    kernel's own way, to read around each touched page, would read all of an index for one item in
    a thousand. Each page is requested once.

    Args:
        array: a contiguous array in a map of :func:`map_file`.
    """

    def __init__(self, array: np.ndarray):
        self._begin, self._item_bytes = array.ctypes.data, array.itemsize
        self.is_small = array.nbytes < SMALL_BYTES
        if self.is_small:
            return
        first, last = self._begin // mmap.PAGESIZE, (self._begin + array.nbytes) // mmap.PAGESIZE
        self._first, self._is_requested = first, np.zeros(last - first + 1, bool)
        self._array = array  # keeps the map
        read_at_random(array)

    def request(self, items: np.ndarray) -> None:
        """Request the pages of some items of the array, given by their indices."""
        if self.is_small:
            return
        pages = (self._begin + items * self._item_bytes) // mmap.PAGESIZE - self._first
        new = np.unique(pages[~self._is_requested[pages]])
        self._is_requested[new] = True
        for run in np.split(new, np.flatnonzero(np.diff(new) > _GAP) + 1) if len(new) else ():
            self._request(int(run[0]), int(run[-1]) + 1)

    def _request(self, first: int, stop: int) -> None:
        begin = (self._first + first) * mmap.PAGESIZE
        # Only advice: a failure is no error.
        _LIBC.madvise(begin, (stop - first) * mmap.PAGESIZE, mmap.MADV_WILLNEED)
