# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The files of an input: local files and objects in a store."""

import io
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from energon_ext.data_files import open_data
from energon_ext.errors import ConfigError
from energon_ext.keyed import sha256
from energon_ext.storage.folders import list_files
from energon_ext.storage.object_store import (
    StoredObject,
    as_msc,
    file_at,
    find_object,
    is_remote,
    objects_below,
    read_range,
)
from energon_ext.tokens.splits import refuse_splits

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


def input_files(paths: Iterable[Path | str], endings: tuple[str, ...] = ()) -> list[StoredObject]:
    """Return the files that paths name: one, those below a folder, or those of a pattern.

    Args:
        endings: of the files that are wanted below a folder; empty if folders are refused.

    Raises:
        ConfigError: there is none, or a folder contains several splits.
    """
    files: list[StoredObject] = []
    for path in paths:
        find = _find_stored if is_remote(path) else _find_local
        files += find(str(path), endings)
    return files


def _find_local(path: str, endings: tuple[str, ...]) -> list[StoredObject]:
    if os.path.isdir(path) and not endings:
        raise ConfigError(f"{path}: is a folder, not a file; use --folder.")
    names = list_files(path, endings)
    if os.path.isdir(path):
        _check_folder(path, names, endings)
    elif not names:
        raise ConfigError(f"{path}: does not exist; check the path.")
    return [file_at(name) for name in names]


def _find_stored(url: str, endings: tuple[str, ...]) -> list[StoredObject]:
    try:
        url = str(as_msc(url)).rstrip("/")
    except ValueError as error:
        raise ConfigError(f"{url}: {error}.") from error
    if found := find_object(url):
        return [found]
    below = sorted(objects_below(url), key=lambda stored: stored.url)
    if not below:
        raise ConfigError(f"{url}: does not exist; check the URL.")
    if not endings:
        raise ConfigError(f"{url}: is a folder, not an object; name its objects one by one.")
    begin = len(url)
    wanted = [
        stored
        for stored in below
        if stored.url.endswith(endings) and "/." not in stored.url[begin:]
    ]
    _check_folder(url, [stored.url for stored in wanted], endings)
    return wanted


def _check_folder(folder: str, files: Sequence[str], endings: tuple[str, ...]) -> None:
    """Raise ConfigError if a folder has no wanted file, or files of several splits."""
    if not files:
        patterns = " or ".join(f"*{ending}" for ending in endings)
        raise ConfigError(f"{folder}: no {patterns} file in this folder.")
    refuse_splits(folder, files, *endings)


def describe(files: Sequence[StoredObject]) -> dict[str, Any]:
    """Return JSON values that reveal a change in the names, sizes or versions of files."""
    lines = (f"{file.url}\0{file.size}\0{file.version}\n" for file in files)
    version = sha256(*(line.encode("utf-8", "replace") for line in lines))[:32]
    num_bytes = sum(file.size for file in files)
    return {"path": files[0].url, "files": len(files), "bytes": num_bytes, "version": version}
