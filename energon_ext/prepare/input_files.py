# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The files of an input: local files and objects in a store."""

import fnmatch
import io
import posixpath
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from energon_ext.data_files import open_data
from energon_ext.errors import ConfigError
from energon_ext.keyed import sha256
from energon_ext.storage.object_store import (
    StoredObject,
    as_msc,
    file_at,
    find_object,
    is_remote,
    objects_below,
    read_range,
)

#: Bytes per request to a store.
_REQUEST_BYTES = 8 * 2**20


def open_input(file: StoredObject) -> BinaryIO:
    """Open a file or object for reading."""
    if not is_remote(file.url):
        return open_data(file.url)
    return io.BufferedReader(_StoredBytes(file), _REQUEST_BYTES)


class _StoredBytes(io.RawIOBase):
    """An object as a file, read by ranges."""

    def __init__(self, file: StoredObject):
        self._file, self._position = file, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        begin = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._file.size}
        self._position = begin[whence] + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        size = max(0, min(len(buffer), self._file.size - self._position))
        if size:
            buffer[:size] = read_range(self._file.url, self._position, size)
            self._position += size
        return size


def input_files(paths: Iterable[Path | str], patterns: Sequence[str] = ()) -> list[StoredObject]:
    """Return the given files, and the sorted files below given folders that match a pattern."""
    files: list[StoredObject] = []
    for path in paths:
        found = (
            _find_stored(str(path), patterns) if is_remote(path) else _local(Path(path), patterns)
        )
        if not found:
            raise ConfigError(f"{path}: no {' or '.join(patterns)} file in this folder.")
        files += found
    return files


def _local(path: Path, patterns: Sequence[str]) -> list[StoredObject]:
    if not path.exists():
        raise ConfigError(f"{path}: does not exist; check the path.")
    if not path.is_dir():
        return [file_at(str(path))]
    if not patterns:
        raise ConfigError(f"{path}: is a folder, not a file; use --folder.")
    files = {file for pattern in patterns for file in path.rglob(pattern) if file.is_file()}
    return [file_at(str(file)) for file in sorted(files)]


def _find_stored(url: str, patterns: Sequence[str]) -> list[StoredObject]:
    try:
        url = str(as_msc(url)).rstrip("/")
    except ValueError as error:
        raise ConfigError(f"{url}: {error}.") from error
    if found := find_object(url):
        return [found]
    below = sorted(objects_below(url), key=lambda stored: stored.url)
    if not below:
        raise ConfigError(f"{url}: does not exist; check the URL.")
    if not patterns:
        raise ConfigError(f"{url}: is a folder, not an object; name its objects one by one.")
    return [
        stored
        for stored in below
        if any(fnmatch.fnmatchcase(posixpath.basename(stored.url), each) for each in patterns)
    ]


def describe(files: Sequence[StoredObject]) -> dict[str, Any]:
    """Return JSON values that reveal a change in the names, sizes or versions of files."""
    lines = (f"{file.url}\0{file.size}\0{file.version}\n" for file in files)
    version = sha256(*(line.encode("utf-8", "replace") for line in lines))[:32]
    num_bytes = sum(file.size for file in files)
    return {"path": files[0].url, "files": len(files), "bytes": num_bytes, "version": version}
