# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Files that are written whole and flushed to disk, or not at all.

A power failure may keep the new name of a file and lose its content, which then reads as zeros. So
the content is flushed before the file is renamed, and the name afterwards.
"""

import contextlib
import errno
import glob
import os
import secrets
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

#: Errors of a file system without hard links.
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)


@contextlib.contextmanager
def open_whole(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file, and at the end flush it to disk and rename it to ``path``.

    Several processes may write a path at once: each has a temporary file of its own. A link at
    ``path`` is replaced, not followed.

    Raises:
        OSError: the file cannot be written; it names the path, and an existing file is unchanged.
    """
    with _temporary(path) as temporary:
        with open(temporary, "xb") as file:
            yield file
            _flush(file)
        os.replace(temporary, path)
        fsync(path.parent)


def move_files(files: Iterable[str], source: Path, target: Path) -> None:
    """Move complete files, by their paths below a folder, to another one that may have them.

    They are on disk when the call returns, under their new names.
    """
    folders = set()
    for file in files:
        moved = target / file
        moved.parent.mkdir(exist_ok=True)
        os.replace(source / file, moved)
        folders.add(moved.parent)
    for folder in sorted(folders):
        fsync(folder)


def create(path: Path, content: bytes) -> bool:
    """Create a small file with its content at once; return False if it exists.

    Where the file system has no hard links, a process that reads it at once may find it empty.

    Raises:
        OSError: the file cannot be written; it names the path, and no file is left.
    """
    if os.path.lexists(path):
        return False
    with _temporary(path) as temporary:
        with open(temporary, "xb") as file:
            file.write(content)
            _flush(file)
        try:
            os.link(temporary, path)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            return _create_in_place(path, content)
    return True


@contextlib.contextmanager
def _temporary(path: Path) -> Iterator[Path]:
    """Yield a path for the content of another one, and remove the file that is left there."""
    name = path.name.removeprefix(".")
    temporary = path.with_name(f".{name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        with name_path(path, temporary):
            yield temporary
    finally:
        with contextlib.suppress(OSError):  # it was renamed, or the file system is read-only
            temporary.unlink()  # also frees the space if the disk is full


def _create_in_place(path: Path, content: bytes) -> bool:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    except FileExistsError:
        return False
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
            _flush(file)
    except OSError:
        with contextlib.suppress(OSError):
            path.unlink()
        raise
    return True


def remove_leftovers(path: Path, before: float) -> None:
    """Remove temporary files of killed processes: those not written to since a time."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        with contextlib.suppress(OSError):
            if left.stat().st_mtime < before:
                left.unlink()


def fsync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def name_path(path: Path, temporary: Path | None = None) -> Iterator[None]:
    """Name a path in an error that names none, as that of a write to a full disk, or its temporary.

    Args:
        temporary: the path under which the file is written.
    """
    try:
        yield
    except OSError as error:
        if error.filename not in (None, str(temporary)):
            raise
        code = error.errno or errno.EIO
        raise OSError(code, error.strerror or str(error), str(path)) from error


def _flush(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
