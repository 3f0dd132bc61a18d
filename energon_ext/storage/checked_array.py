# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Arrays in cache files, with a checksum per page that is compared when the page is first used.

So a start does not read a file as a whole, and a page that was lost or changed is never used. The
checksums, CRC-32, follow the items of the array, or are in a file next to one of another format.
"""

import contextlib
import copy
import os
import zlib
from array import array
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from energon_ext.errors import ConfigError
from energon_ext.storage.file_map import map_file

#: Suffix of a file with the checksums of the one next to it.
SUMS = ".sums"

#: Bytes of a page; the size of an item, a power of two, divides it.
PAGE = 4096


class CheckedWriter:
    """Writes the items of an array to an open file, and at the end the checksums."""

    def __init__(self, file: BinaryIO):
        self._file, self._sums, self._unfinished = file, array("I"), b""

    def write(self, items: np.ndarray) -> None:
        """Append items."""
        content = memoryview(self._unfinished + items.tobytes())
        whole = len(content) // PAGE * PAGE
        self._file.write(content[:whole])
        self._sums.extend(_checksum(content[at : at + PAGE]) for at in range(0, whole, PAGE))
        self._unfinished = content[whole:].tobytes()

    def close(self) -> None:
        """Write what is left, and the checksums."""
        self._file.write(self._unfinished)
        if self._unfinished:
            self._sums.append(_checksum(self._unfinished))
        self._file.write(np.array(self._sums, "<u4").tobytes())


def write_checksums(path: Path) -> None:
    """Write the checksums of a file next to it."""
    with open(path, "rb") as file:
        sums = array("I", map(_checksum, iter(lambda: file.read(PAGE), b"")))
    Path(f"{path}{SUMS}").write_bytes(np.array(sums, "<u4").tobytes())


class CheckedArray:
    """A mapped array whose pages are checked before their first use.

    Indexing takes what indexing a NumPy array takes: a number, a slice or an array of numbers.

    Args:
        path: a file written by :class:`CheckedWriter`, or one for :func:`write_checksums`.
        dtype: type of the items.
        items: number of items; None to take it from the size of the file.
        is_apart: whether the checksums are in a file next to it.

    Raises:
        ConfigError: the file has another size; or, on use, a page is damaged. A damaged file is
            removed, so that it is made again.
        OSError: it cannot be read.
    """

    def __init__(
        self,
        path: str,
        dtype: str | np.dtype[Any],
        items: int | None = None,
        *,
        is_apart: bool = False,
    ):
        self.path = path
        item_bytes, num_bytes = np.dtype(dtype).itemsize, os.path.getsize(path)
        pages = -(-num_bytes // (PAGE if is_apart else PAGE + 4))
        content = num_bytes if is_apart else num_bytes - 4 * pages
        if content < 0 or content % item_bytes or items not in (None, content // item_bytes):
            raise _damaged(path, f"it has {num_bytes} bytes")
        self._bytes = map_file(path, num_bytes)
        #: The items, not checked.
        self.items = self._bytes[:content].view(dtype)
        sums = _read_sums(path, 4 * pages) if is_apart else self._bytes[content:]
        self._sums = sums.view("<u4")
        self._num_bytes = content
        self._shift = (PAGE // item_bytes).bit_length() - 1  # of an item to its page
        self._is_checked = np.zeros(pages, bool)

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, where: Any) -> Any:
        if isinstance(where, slice):
            begin, stop, _ = where.indices(len(self.items))
            first, end = begin >> self._shift, ((stop - 1) >> self._shift) + 1
            if self._is_checked[first:end].all():
                return self.items[where]
            pages = np.arange(first, end)
        else:
            numbers = np.asarray(where)
            if numbers.size and numbers.min() < 0:
                numbers = numbers % len(self.items)
            pages = numbers >> self._shift
        if not self._is_checked[pages].all():
            self._check(np.unique(pages))
        return self.items[where]

    def first(self, count: int) -> "CheckedArray":
        """Return the first items, which share the checks of all."""
        part = copy.copy(self)
        part.items = self.items[:count]
        return part

    def _check(self, pages: np.ndarray) -> None:
        pages = pages[~self._is_checked[pages]]
        content, end = self._bytes.data, self._num_bytes
        for page, checksum in zip(pages.tolist(), self._sums[pages].tolist()):
            if _checksum(content[page * PAGE : min((page + 1) * PAGE, end)]) != checksum:
                raise _damaged(self.path, f"page {page} does not have the checksum written with it")
            self._is_checked[page] = True


def _read_sums(path: str, num_bytes: int) -> np.ndarray:
    try:
        return map_file(path + SUMS, num_bytes, is_whole=True)
    except (OSError, ConfigError) as error:
        raise _damaged(path, f"{path}{SUMS} is missing or damaged") from error


def _checksum(content: bytes | memoryview) -> int:
    return zlib.crc32(content)


def _damaged(path: str, reason: str) -> ConfigError:
    remedy = "remove it"
    with contextlib.suppress(OSError):
        os.unlink(path)
        remedy = "it was removed"
    return ConfigError(
        f"{path}: this cached file is damaged ({reason}); {remedy}, and the next start makes it "
        f"again."
    )
