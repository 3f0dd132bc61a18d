# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""A file as an array, without an open file.

A source of 10 000 pairs is looked up all over at once. ``mmap.mmap`` keeps a file descriptor for
each map before Python 3.13, and the usual limit is 1024; the kernel itself keeps none.

A file that is too short is refused when it is mapped. One that is cut while it is mapped ends the
process by signal 7 (SIGBUS) at the first read behind its end: no program can look before each read,
so data must not be overwritten in place under a run.
"""

import ctypes
import mmap
import os
from typing import Any

import numpy as np

from energon_ext.data_files import open_descriptor
from energon_ext.errors import ConfigError

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_FAILED = ctypes.c_void_p(-1).value


class _FileMap:
    """The memory of a mapped file; arrays over it keep it, and the last one that goes unmaps it."""

    __slots__ = ("_address", "_num_bytes", "_unmap")

    def __init__(self, path: str, num_bytes: int):
        file = open_descriptor(path)
        try:
            found = os.fstat(file).st_size
            if found < num_bytes:
                raise ConfigError(
                    f"{path}: has {found} bytes, {num_bytes} are needed; it was cut or replaced, "
                    f"copy it again."
                )
            address = _LIBC.mmap(None, num_bytes, mmap.PROT_READ, mmap.MAP_SHARED, file, 0)
        finally:
            os.close(file)
        if address == _FAILED:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), path)
        self._address, self._num_bytes = address, num_bytes
        self._unmap = _LIBC.munmap  # at the end of a process the module may be gone first

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


def map_file(path: str, num_bytes: int) -> np.ndarray:
    """The first bytes of a file, uint8 [num_bytes], read-only; ConfigError where it is shorter."""
    if num_bytes == 0:  # the kernel maps nothing
        return np.zeros(0, np.uint8)
    return np.asarray(_FileMap(path, num_bytes))
