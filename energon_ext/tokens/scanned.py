# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Documents of files that do not list where each document begins: one pass finds it, and is kept.

What it finds is one file in the cache: where each document ends, in tokens over all files, and the
first document of each file, as int64. It is mapped, so all processes of a machine share its memory,
and its pages have checksums.
Its name is a digest of the paths, sizes and times of the files, so a changed file is read again. If
several processes need it at once, one makes it and the others wait.
"""

import functools
import json
import os
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from energon_ext.batch.columns import LABEL_WEIGHTS, TOKENS
from energon_ext.data_files import CACHE_VARIABLE, cache_path, reading
from energon_ext.errors import ConfigError, log_of
from energon_ext.progress import passing_bar
from energon_ext.storage.checked_array import CheckedArray, CheckedWriter
from energon_ext.storage.claim import UnwritableError, make_once
from energon_ext.storage.folders import list_files
from energon_ext.storage.object_store import StoredObject, file_at, is_remote
from energon_ext.storage.whole_file import open_whole
from energon_ext.tokens.documents import Documents, FileFacts, Origin, watched
from energon_ext.tokens.splits import refuse_splits

logger = log_of(__name__)

#: Changes when the content of the file does.
_VERSION = 2

_INT64 = np.dtype("<i8")


class ScannedFiles(Documents):
    """The documents of files, numbered from the first file to the last; see the module.

    A subclass needs :meth:`scan` and :meth:`read_pieces`.

    Args:
        files: in the order of their documents.
        how: JSON values that the lengths depend on in addition to the files.
    """

    def __init__(self, files: Sequence[StoredObject], how: Any = None):
        self.files = list(files)
        self.how = how
        watched.add(self)

    @abstractmethod
    def scan(self, file: int) -> Iterator[np.ndarray]:
        """Yield the tokens of the documents of a file, int64, in order and in parts."""

    @abstractmethod
    def read_pieces(
        self, numbers: Sequence[int], starts: Sequence[int], stops: Sequence[int]
    ) -> tuple[list[Any], list[Any]]:
        """Return the tokens and the label weights of many pieces, as :meth:`read` does."""

    def read(
        self,
        numbers: Sequence[int],
        starts: Sequence[int],
        stops: Sequence[int],
        names: Collection[str] | None = None,
    ) -> dict[str, list[Any]]:
        tokens, weights = self.read_pieces(numbers, starts, stops)
        found = {TOKENS: tokens, LABEL_WEIGHTS: weights}
        return found if names is None else {name: found[name] for name in names}

    def tokens(self, number: int, start: int, stop: int) -> np.ndarray:
        ((tokens,), _) = self.read_pieces([number], [start], [stop])
        return np.asarray(tokens)

    def label_weights(self, number: int, start: int, stop: int) -> np.ndarray | None:
        (_, (weights,)) = self.read_pieces([number], [start], [stop])
        return None if weights is None else np.asarray(weights)

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

    @functools.cached_property
    def ends(self) -> CheckedArray:
        """Tokens before each document, and of all documents, int64 [documents + 1]."""
        return self._found.first(len(self._found) - len(self.files) - 1)

    @functools.cached_property
    def first_documents(self) -> np.ndarray:
        """First document of each file, and the number of all documents, int64 [files + 1]."""
        found: np.ndarray = self._found[-len(self.files) - 1 :]
        return found

    @functools.cached_property
    def _found(self) -> CheckedArray:
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

    def _read(self, path: Path) -> CheckedArray | None:
        """Open the file; None if there is none, or it is not whole."""
        try:
            found = CheckedArray(str(path), _INT64.str)
        except (FileNotFoundError, NotADirectoryError, ConfigError):
            return None  # there is none, or it has another size
        documents = len(found) - len(self.files) - 2
        return found if documents >= 0 and found[-1] == documents else None

    def _cache_file(self) -> Path:
        files = [[os.path.realpath(f.url), f.size, f.version] for f in self.files]
        text = json.dumps([_VERSION, type(self).__name__, self.how, files])
        folder, name = os.path.split(self.files[0].url)
        return cache_path(Path(folder), name, text, ".lengths")

    def _make(self, path: Path, beat: Callable[[], None]) -> CheckedArray:
        """Read all files, and write where their documents end."""
        title = self.files[0].url + (f" and {len(self.files) - 1} more" * (len(self.files) > 1))
        logger.info("%s: looking for the lengths of its documents, once.", title)
        end, firsts = 0, [0]
        total = sum(stored.size for stored in self.files)
        with open_whole(path) as file, passing_bar("lengths", total, unit="B") as bar:
            items = CheckedWriter(file)
            items.write(np.zeros(1, _INT64))
            for number, stored in enumerate(self.files):
                count = 0
                for lengths in self.scan(number):
                    beat()
                    ends = end + np.cumsum(lengths, dtype=_INT64)
                    items.write(ends)
                    end, count = int(ends[-1]) if len(ends) else end, count + len(ends)
                check_unchanged(stored)
                firsts.append(firsts[-1] + count)
                bar.update(stored.size)
            items.write(np.array(firsts, _INT64))
            items.close()
        found = self._read(path)
        assert found is not None
        return found


# Files ------------------------------------------------------------------------------------------


def check_unchanged(stored: StoredObject) -> None:
    """Raise ConfigError unless a file is as long as when it was opened."""
    with reading(stored.url):
        found = file_at(stored.url)
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
    names = list_files(path, (suffix,))
    if not names:
        raise ConfigError(f"{path}: names no {suffix} file; check the path.")
    if os.path.isdir(path):
        refuse_splits(path, names, suffix)
    with reading(path):
        return [file_at(name) for name in names]
