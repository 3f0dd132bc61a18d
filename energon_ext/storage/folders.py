# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The names in local folders, each listed once in a load, and the files that a path names.

While datasets are loaded, each path of a metadataset is looked up several times: when its YAML is
checked, when it is resolved, and when it is opened. With ten thousand sources on thousands of ranks
these would be billions of requests to a file system, so a load lists each folder once.
"""

import contextlib
import glob
import itertools
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from fnmatch import translate
from typing import Any, TypeVar

from energon_ext.data_files import reading
from energon_ext.errors import ConfigError

MAX_FOLDERS = 50_000  # below one; links may turn few folders into very many

#: What a folder contains, by name.
Names = Mapping[str, "os.DirEntry[str]"]

_T = TypeVar("_T")

_LISTED: ContextVar[dict[str, Names] | None] = ContextVar("listed", default=None)
_FOUND: ContextVar[dict[Any, Any] | None] = ContextVar("found", default=None)


@contextlib.contextmanager
def list_folders_once() -> Iterator[None]:
    """List each folder at most once in the block; what is written meanwhile may be overlooked."""
    listed, found = _LISTED.set({}), _FOUND.set({})
    try:
        yield
    finally:
        _LISTED.reset(listed)
        _FOUND.reset(found)


def find_once(find: Callable[[str], _T | None], path: str) -> _T | None:
    """Return what a function finds at a path; in a load it is called once, unless it finds nothing.

    A load may write a folder, such as tokenized text.
    """
    known = _FOUND.get()
    if known is None:
        return find(path)
    if (found := known.get((find, path))) is None and (found := find(path)) is not None:
        known[find, path] = found
    return found


def names_in(folder: str) -> Names:
    """Return what is in a folder, nothing if it is none; ConfigError if it cannot be read."""
    listed = _LISTED.get()
    if listed is not None and folder in listed:
        return listed[folder]
    names = {}
    absent = contextlib.suppress(FileNotFoundError, NotADirectoryError)
    with reading(folder), absent, os.scandir(folder or os.curdir) as entries:
        names = {entry.name: entry for entry in entries}
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


# Files ------------------------------------------------------------------------------------------


def list_files(path: str, endings: tuple[str, ...] = ("",)) -> list[str]:
    """Return the files that a path names, sorted: one, those below a folder, or a pattern.

    Hidden names are ignored unless a pattern begins with a dot there.

    Args:
        endings: of the files that are wanted below a folder.
    """
    if os.path.isdir(path):
        return sorted(files_below(path, endings))
    if os.path.exists(path):
        return [path]
    return sorted(_matching_files(path))


def files_below(folder: str, endings: tuple[str, ...]) -> Iterator[str]:
    """Yield the files with one of some endings in a folder and below it."""
    for path, names in walk_folders(folder):
        for name, entry in names.items():
            is_wanted = name.endswith(endings) and not name.startswith(".")
            if is_wanted and not is_folder(entry):
                yield os.path.join(path, name)


def _matching_files(pattern: str) -> Iterator[str]:
    for folder, names, is_match in matching_folders(pattern):
        for name, entry in names.items():
            if is_match(name) and not is_folder(entry):
                yield os.path.join(folder, name)


def matching_folders(pattern: str) -> Iterator[tuple[str, Names, Callable[[str], bool]]]:
    """Yield the folders that match all of a pattern but its last part.

    Each comes with what is in it, and with a function that tells whether a name there matches the
    last part. A ``**`` matches any number of folders, and at the end also everything in them.
    ConfigError if too many folders match: links may turn few folders into very many.
    """
    *above, name = pattern.split("/")
    if name == "**":
        above, name = [*above, name], "*"
    matches = re.compile(translate(name)).match

    def is_match(found: str) -> bool:
        return bool(matches(found)) and found.startswith(".") <= name.startswith(".")

    folders = ["/" if pattern.startswith("/") else ""]
    for part in filter(None, above):
        found = (each for folder in folders for each in _folders(folder, part))
        folders = list(itertools.islice(found, MAX_FOLDERS + 1))
        if len(folders) > MAX_FOLDERS or pattern.count("**") > 1:
            raise ConfigError(
                f"{pattern}: matches more than {MAX_FOLDERS:,} folders or has more than one `**`."
            )
    for folder in folders:
        yield folder, names_in(folder), is_match


def _folders(folder: str, part: str) -> Iterator[str]:
    """Yield the folders below another one that match one part of a pattern."""
    if part != "**":
        yield from glob.iglob(os.path.join(glob.escape(folder), part, ""))
        return
    for path, _ in walk_folders(folder):
        yield path
