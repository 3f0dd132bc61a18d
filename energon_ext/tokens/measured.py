# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Documents of files that do not list where each document begins: one pass finds it, and is kept.

What it finds is one file in the cache: where each document ends, in tokens over all files, and the
first document of each file, as int64. It is mapped, so all processes of a machine share its memory.
Its name is a digest of the paths, sizes and times of the files, so a changed file is read again. If
several processes need it at once, one makes it and the others wait.
"""

import functools
import glob
import json
import os
import re
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from energon_ext.data_files import CACHE_VARIABLE, cache_path
from energon_ext.errors import ConfigError, log_of
from energon_ext.storage.claim import UnwritableError, make_once
from energon_ext.storage.file_map import map_file
from energon_ext.storage.folders import is_folder, walk_folders
from energon_ext.storage.object_store import StoredObject, file_at, is_remote
from energon_ext.tokens.documents import Documents, FileFacts, Origin, watched

logger = log_of(__name__)

#: Changes when the content of the file does.
_VERSION = 1

#: First words of the names of splits, which must not be combined into one source.
_SPLITS = {"train", "val", "valid", "validation", "dev", "test"}

_INT64 = np.dtype("<i8")


class MeasuredFiles(Documents):
    """The documents of files, numbered from the first file to the last; see the module.

    A subclass needs :meth:`measure` and :meth:`read`.

    Args:
        files: in the order of their documents.
        how: JSON values that the lengths depend on in addition to the files.
    """

    def __init__(self, files: Sequence[StoredObject], how: Any = None):
        self.files = list(files)
        self.how = how
        watched.add(self)

    @abstractmethod
    def measure(self, file: int) -> Iterator[np.ndarray]:
        """Yield the tokens of the documents of a file, int64, in order and in parts."""

    @abstractmethod
    def read(
        self, numbers: Sequence[int], starts: Sequence[int], stops: Sequence[int]
    ) -> tuple[list[np.ndarray], list[np.ndarray | None]]: ...

    def tokens(self, number: int, start: int, stop: int) -> np.ndarray:
        return self.read([number], [start], [stop])[0][0]

    def label_weights(self, number: int, start: int, stop: int) -> np.ndarray | None:
        return self.read([number], [start], [stop])[1][0]

    def __len__(self) -> int:
        return len(self.ends) - 1

    def lengths(self, numbers: np.ndarray) -> np.ndarray:
        numbers = np.asarray(numbers, np.int64)
        return self.ends[numbers + 1] - self.ends[numbers]

    def tokens_in(self, first: int, stop: int) -> int:
        return int(self.ends[max(first, stop)] - self.ends[first])

    def files_of(self, numbers: Sequence[int]) -> np.ndarray:
        """Return the number of the file of each document."""
        return np.searchsorted(self.first_documents, np.asarray(numbers), side="right") - 1

    def origin(self, number: int) -> Origin:
        file = int(self.files_of([number])[0])
        return Origin(self.files[file].url, number - int(self.first_documents[file]), None)

    def describe_files(self) -> list[FileFacts]:
        firsts = self.first_documents
        counts = zip(self.files, np.diff(firsts).tolist(), np.diff(self.ends[firsts]).tolist())
        return [
            FileFacts(file.url, f"{documents:,} documents, {tokens:,} tokens, {file.size:,} bytes")
            for file, documents, tokens in counts
        ]

    def check_files(self) -> None:
        for stored in self.files:
            check_unchanged(stored)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.files, self.how)

    # What the pass has found ----------------------------------------------------------------

    @property
    def ends(self) -> np.ndarray:
        """Tokens before each document, and of all documents, int64 [documents + 1]."""
        return self._found[: -len(self.files) - 1]

    @property
    def first_documents(self) -> np.ndarray:
        """First document of each file, and the number of all documents, int64 [files + 1]."""
        return self._found[-len(self.files) - 1 :]

    @functools.cached_property
    def _found(self) -> np.ndarray:
        path = self._cache_file()
        try:
            return make_once(path, partial(self._read, path), partial(self._make, path))
        except UnwritableError as error:
            raise ConfigError(
                f"{path.parent}: cannot be written to ({error}); set {CACHE_VARIABLE} to a "
                f"writable folder."
            ) from error
        except OSError as error:
            raise ConfigError(f"{path}: cannot be made ({error}).") from error

    def _read(self, path: Path) -> np.ndarray | None:
        if not path.exists():
            return None
        content = map_file(str(path), os.path.getsize(path))
        found = content[: len(content) // 8 * 8].view(_INT64)
        parts = len(found) - len(self.files) - 2  # documents, if the file is whole
        if len(found) * 8 != len(content) or parts < 0 or found[-1] != parts:
            raise ConfigError(f"{path}: damaged; remove it, and it is made again.")
        return found

    def _cache_file(self) -> Path:
        files = [[os.path.realpath(f.url), f.size, f.version] for f in self.files]
        text = json.dumps([_VERSION, type(self).__name__, self.how, files])
        folder, name = os.path.split(self.files[0].url)
        return cache_path(Path(folder), name, text, ".lengths")

    def _make(self, path: Path, beat: Callable[[], None]) -> np.ndarray:
        """Read all files, and write where their documents end."""
        title = self.files[0].url + (f" and {len(self.files) - 1} more" * (len(self.files) > 1))
        logger.info("%s: looking for the lengths of its documents, once.", title)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        end, firsts = 0, [0]
        try:
            with open(temporary, "wb") as file, _progress_bar(self.files) as bar:
                np.zeros(1, _INT64).tofile(file)
                for number, stored in enumerate(self.files):
                    count = 0
                    for lengths in self.measure(number):
                        beat()
                        ends = end + np.cumsum(lengths, dtype=_INT64)
                        ends.tofile(file)
                        end, count = int(ends[-1]) if len(ends) else end, count + len(ends)
                    check_unchanged(stored)
                    firsts.append(firsts[-1] + count)
                    bar.update(stored.size)
                np.array(firsts, _INT64).tofile(file)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        found = self._read(path)
        assert found is not None
        return found


def _progress_bar(files: Sequence[StoredObject]) -> Any:
    total = sum(stored.size for stored in files)
    return tqdm(total=total, desc="lengths", unit="B", unit_scale=True, leave=False, disable=None)


# Files ------------------------------------------------------------------------------------------


def check_unchanged(stored: StoredObject) -> None:
    """Raise ConfigError unless a file is as long as when it was opened."""
    try:
        found = file_at(stored.url)
    except OSError as error:
        raise ConfigError(f"{stored.url}: cannot be read ({error.strerror}).") from error
    if found.size != stored.size:
        raise ConfigError(
            f"{stored.url}: has {found.size} bytes, but had {stored.size} when it was opened; it "
            f"was truncated or replaced, copy it again."
        )


def local_files(path: str, suffix: str) -> list[StoredObject]:
    """Return the files with a suffix that a path names: one, those below a folder, or a pattern.

    Raises:
        ConfigError: there is none, they are in an object store, or belong to different splits.
    """
    if is_remote(path):
        raise ConfigError(
            f"{path}: {suffix} files with token ids are read from a file system only; copy them to "
            f"one. `energon-ext prepare` turns Parquet with text into token files."
        )
    if os.path.isdir(path):
        names = sorted(names_below(path, suffix))
        _check_splits(path, names, suffix)
    elif os.path.exists(path):
        names = [path]
    else:
        names = sorted(filter(os.path.isfile, glob.iglob(path, recursive=True)))
    if not names:
        raise ConfigError(f"{path}: names no {suffix} file; check the path.")
    try:
        return [file_at(name) for name in names]
    except OSError as error:
        raise ConfigError(f"{error.filename}: cannot be read ({error.strerror}).") from error


def names_below(folder: str, suffix: str | tuple[str, ...]) -> Iterator[str]:
    """Yield the files with a suffix in a folder and below it; hidden names are ignored."""
    for path, names in walk_folders(folder):
        for name, entry in names.items():
            is_wanted = name.endswith(suffix) and not name.startswith(".")
            if is_wanted and not is_folder(entry):
                yield os.path.join(path, name)


def _check_splits(folder: str, names: Sequence[str], suffix: str) -> None:
    """Raise ConfigError if files of several splits, such as train and test, are below a folder."""
    first_words = {
        word
        for name in names
        for part in os.path.relpath(name, folder).split(os.sep)
        for word in [re.split(r"[-._]", part)[0]]
        if word in _SPLITS
    }
    if len(first_words) > 1:
        raise ConfigError(
            f"{folder}: contains the splits {' and '.join(sorted(first_words))}, which cannot be "
            f"one source; name one of them, such as {folder}/train*{suffix}."
        )
