# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The names in local folders, each listed once in a load.

While datasets are loaded, each path of a metadataset is looked up several times: when its YAML is
checked, when it is resolved, and when it is opened. With ten thousand sources on thousands of ranks
these would be billions of requests to a file system, so a load lists each folder once.
"""

import contextlib
import os
from collections.abc import Iterator, Mapping
from contextvars import ContextVar

from energon_ext.errors import ConfigError

MAX_FOLDERS = 50_000  # below one; links may turn few folders into very many

#: What a folder contains, by name.
Names = Mapping[str, "os.DirEntry[str]"]

_LISTED: ContextVar[dict[str, Names] | None] = ContextVar("listed", default=None)


@contextlib.contextmanager
def list_folders_once() -> Iterator[None]:
    """List each folder at most once in the block; what is written meanwhile may be overlooked."""
    token = _LISTED.set({})
    try:
        yield
    finally:
        _LISTED.reset(token)


def names_in(folder: str) -> Names:
    """Return what is in a folder, nothing if it is none; ConfigError if it cannot be read."""
    listed = _LISTED.get()
    if listed is not None and folder in listed:
        return listed[folder]
    names = {}
    try:
        with os.scandir(folder or os.curdir) as entries:
            names = {entry.name: entry for entry in entries}
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be read ({error.strerror}).") from error
    if listed is not None and names:  # a load may write a folder, such as tokenized text
        listed[folder] = names
    return names


def names_beside(path: str) -> Names:
    """Return what is in the folder of a path if a load lists it anyway, else nothing.

    That a name is missing proves nothing: a file system may show it only once it is asked for it.
    """
    if _LISTED.get() is None:
        return {}
    try:
        return names_in(os.path.dirname(path))
    except ConfigError:  # one may open a file in a folder that one may not list
        return {}


def walk_folders(folder: str) -> Iterator[tuple[str, Names]]:
    """Yield a folder and those below it with what is in them, without hidden folders.

    ConfigError if there are more than MAX_FOLDERS, or one cannot be read.
    """
    waiting, count = [folder], 0
    while waiting:
        path = waiting.pop()
        count += 1
        if count > MAX_FOLDERS:
            raise ConfigError(f"{folder}: has more than {MAX_FOLDERS:,} folders below it.")
        names = names_in(path)
        yield path, names
        below = (each for each in names.values() if not each.name.startswith("."))
        waiting += [os.path.join(path, each.name) for each in below if is_folder(each)]


def is_folder(entry: "os.DirEntry[str]") -> bool:
    """Return whether a name is that of a folder or of a link to one."""
    try:
        return entry.is_dir()
    except OSError:
        return False
