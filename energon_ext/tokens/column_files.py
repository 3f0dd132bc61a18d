# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The files of columns.

A column is a plain ``.npy`` file next to a pair, ``PREFIX.NAME.npy``, with as many items as there
are tokens or documents. NumPy writes a header of 128 bytes, so the place of an item in a file is
arithmetic, also in an object store; what the header says must equal what the pair implies. The file
of the label weights, ``PREFIX.weights.bin``, has no header.
"""

import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from energon_ext.batch.columns import LABEL_WEIGHTS, Column, check_values
from energon_ext.data_files import reading
from energon_ext.errors import ConfigError
from energon_ext.storage.file_map import map_file
from energon_ext.storage.object_store import StoredObject, local_copy
from energon_ext.storage.range_reader import RemoteTokens

#: Bytes of the header of a file that has one.
HEADER_BYTES = 128

WEIGHTS_SUFFIX = ".weights.bin"


def suffix_of(name: str) -> str:
    """Return the suffix of the file of a column."""
    return WEIGHTS_SUFFIX if name == LABEL_WEIGHTS else f".{name}.npy"


def suffixes_of_columns(names: Iterable[str]) -> dict[str, set[str]]:
    """Return the suffixes of the files of columns among some files, by the name of their pair."""
    found: dict[str, set[str]] = {}
    for name in names:
        if name.endswith(".npy"):
            pair, dot, column = name.removesuffix(".npy").rpartition(".")
            if dot:
                found.setdefault(pair, set()).add(suffix_of(column))
    return found


def _header_bytes(path: str) -> int:
    return HEADER_BYTES if path.endswith(".npy") else 0


def check_size(path: str, found: int | None, column: Column, count: int) -> None:
    """Raise ConfigError unless a file has the size of a column; None if it does not exist."""
    begin = _header_bytes(path)
    needed = begin + count * column.item_bytes
    if found != needed:
        words = "does not exist" if found is None else f"has {found:,} bytes"
        raise ConfigError(
            f"{path}: {words}; {count:,} {column.per}s need {needed:,} bytes, {column.item_bytes} "
            f"each{f' after a header of {begin}' if begin else ''}; copy it again."
        )


def open_column(
    path: str,
    column: Column,
    count: int,
    stored: StoredObject | None = None,
    *,
    is_copied: bool = False,
) -> "np.ndarray | RemoteTokens":
    """Open a column of a number of items, [count, *item], read by slices.

    Args:
        stored: the object if it is in an object store.
        is_copied: whether an object is copied as a whole and read from there.

    Raises:
        ConfigError: the file is not a column like this.
    """
    begin = _header_bytes(path)
    if stored is not None and not is_copied:
        check_size(path, stored.size, column, count)
        header = RemoteTokens(stored, np.dtype(np.uint8))[:begin].tobytes()
        _check_header(path, header, column, count)
        return RemoteTokens(stored, column.dtype, begin, column.item)
    with reading(path, advice="; copy it again"):
        local = path if stored is None else local_copy(stored)
        content = map_file(local, begin + count * column.item_bytes, is_whole=True)
    _check_header(path, content[:begin].tobytes(), column, count)
    return content[begin:].view(column.dtype).reshape(count, *column.item)


def _check_header(path: str, found: bytes, column: Column, count: int) -> None:
    """Raise ConfigError if values have another type, shape or order than a column implies."""
    needed = _header(path, column, count)
    if found.split() != needed.split():
        raise ConfigError(
            f"{path}: its header is {found[10:].decode('latin1').strip()!r:.200}, but its pair "
            f"implies {needed[10:].decode().strip()!r}; write it again."
        )


def _header(path: str, column: Column, count: int) -> bytes:
    """Return the header that NumPy writes; empty for a file without one."""
    if not _header_bytes(path):
        return b""
    file = io.BytesIO()
    described = np.lib.format.dtype_to_descr(column.dtype)
    shape = (count, *column.item)
    np.lib.format.write_array_header_1_0(
        file, {"descr": described, "fortran_order": False, "shape": shape}
    )
    header = file.getvalue()
    assert len(header) == HEADER_BYTES, "a shape of at most five dimensions fits"
    return header


class ColumnWriter:
    """Writes one column, document by document.

    Args:
        prefix: path of the pair, without suffix.
        name: of the column.
        column: its values.
    """

    def __init__(self, prefix: str | Path, name: str, column: Column):
        self._name, self.column, self._count = name, column, 0
        self._path = f"{prefix}{suffix_of(name)}"
        self._file = open(self._path, "wb")  # noqa: SIM115 - see `abandon`
        self._file.write(bytes(_header_bytes(self._path)))

    def write(self, values: Any, tokens: int, origin: str = "") -> None:
        """Append the values of a document.

        Args:
            values: [tokens, *item], or [*item] if they are per document; None for fill values.
            tokens: of the document.
            origin: where it was read, for messages.

        Raises:
            SampleError: they have another shape, or do not fit the type.
        """
        array = check_values(self._name, self.column, values, tokens, origin)
        self._file.write(array.tobytes())
        self._count += tokens if self.column.per == "token" else 1

    def close(self) -> None:
        """Write the header."""
        self._file.seek(0)
        self._file.write(_header(self._path, self.column, self._count))
        self._file.close()

    def abandon(self) -> None:
        """Close the file without finishing it."""
        self._file.close()
