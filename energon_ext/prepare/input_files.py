# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The files of an input: local ones, and objects in a store."""

import fnmatch
import hashlib
import io
import posixpath
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from energon_ext.data_files import open_data
from energon_ext.documents.object_store import (
    StoredObject,
    as_msc,
    find_object,
    is_remote,
    objects_below,
    read_range,
)
from energon_ext.errors import ConfigError

#: Bytes of one request to a store.
_REQUEST_BYTES = 8 * 2**20


@dataclass(frozen=True)
class InputFile:
    """A file as it was found.

    Attributes:
        path: as messages name it.
        size: in bytes.
        version: changes when the file is written again: its time, or the ETag of an object.
    """

    path: str
    size: int
    version: str

    @classmethod
    def local(cls, path: Path) -> "InputFile":
        found = path.stat()
        return cls(str(path), found.st_size, str(found.st_mtime_ns))

    @classmethod
    def stored(cls, found: StoredObject) -> "InputFile":
        return cls(found.url, found.size, str(found.version))

    @property
    def suffix(self) -> str:
        return posixpath.splitext(self.path)[1]

    @property
    def is_stored(self) -> bool:
        return is_remote(self.path)

    def open(self) -> BinaryIO:
        """A file object from the first byte on."""
        if not self.is_stored:
            return open_data(self.path)
        return io.BufferedReader(_StoredBytes(self), _REQUEST_BYTES)

    def __str__(self) -> str:
        return self.path


class _StoredBytes(io.RawIOBase):
    """An object as a file, read by ranges."""

    def __init__(self, file: InputFile):
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
            buffer[:size] = read_range(self._file.path, self._position, size)
            self._position += size
        return size


def input_files(paths: Iterable[Path | str], patterns: Sequence[str] = ()) -> list[InputFile]:
    """Files themselves, and those below folders that match a pattern, sorted."""
    found: list[InputFile] = []
    for path in paths:
        inside = _stored(str(path), patterns) if is_remote(path) else _local(Path(path), patterns)
        if not inside:
            raise ConfigError(f"{path}: a folder without {' or '.join(patterns)}.")
        found += inside
    return found


def _local(path: Path, patterns: Sequence[str]) -> list[InputFile]:
    if not path.exists():
        raise ConfigError(f"{path}: no such file.")
    if not path.is_dir():
        return [InputFile.local(path)]
    if not patterns:
        raise ConfigError(f"{path}: a folder, not a file. Use --folder for folders.")
    inside = {file for pattern in patterns for file in path.rglob(pattern) if file.is_file()}
    return [InputFile.local(file) for file in sorted(inside)]


def _stored(url: str, patterns: Sequence[str]) -> list[InputFile]:
    try:
        url = str(as_msc(url)).rstrip("/")
    except ValueError as error:
        raise ConfigError(f"{url}: {error}.") from error
    if found := find_object(url):
        return [InputFile.stored(found)]
    below = sorted(objects_below(url), key=lambda stored: stored.url)
    if not below:
        raise ConfigError(f"{url}: no such object.")
    if not patterns:
        raise ConfigError(f"{url}: a folder, not an object; name each.")
    names = {stored.url: posixpath.basename(stored.url) for stored in below}
    return [
        InputFile.stored(stored)
        for stored in below
        if any(fnmatch.fnmatchcase(names[stored.url], pattern) for pattern in patterns)
    ]


def described(files: Sequence[InputFile]) -> dict[str, Any]:
    """JSON values by which a change of some files is noticed: names, sizes and versions."""
    digest = hashlib.sha256()
    for file in files:
        line = f"{file.path}\0{file.size}\0{file.version}\n"
        digest.update(line.encode("utf-8", "replace"))
    version, num_bytes = digest.hexdigest()[:32], sum(file.size for file in files)
    return {"path": files[0].path, "files": len(files), "bytes": num_bytes, "version": version}
