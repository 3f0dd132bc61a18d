# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Columns in a folder of their own: what somebody else says of documents, such as a teacher.

The folder belongs to the documents with a fingerprint, in any store and however they are divided
into files. It has parts of consecutive documents, each with one file per column; a file with the
end of each document, in tokens, says where its values are. A fingerprint is of a sample, so each
document has a checksum, too, which is compared when a process first reads it.
"""

from __future__ import annotations

import functools
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from energon_ext.batch.columns import TOKENS, Column, columns_in
from energon_ext.data_files import read_data
from energon_ext.errors import ConfigError
from energon_ext.storage.object_store import (
    StoredObject,
    as_msc,
    file_name,
    is_remote,
    read_object,
)
from energon_ext.storage.range_reader import RemoteTokens
from energon_ext.tokens.column_files import check_size, open_column, suffix_of
from energon_ext.tokens.documents import Documents
from energon_ext.tokens.index import MAX_MAPS, PREPARED, Numbers
from energon_ext.tokens.prepared import parse_prepared

#: The folder of the files in it.
PARTS = "columns"

#: The file with the end of each document of a part.
ENDS = "ends"
ENDS_COLUMN = Column(np.dtype(np.int64), per="document")

#: The file with the checksum of the tokens of each document of a part.
DIGESTS = "digests"
DIGESTS_COLUMN = Column(np.dtype(np.int64), per="document")

#: The files of each part in addition to those of the columns.
OWN_FILES = {ENDS: ENDS_COLUMN, DIGESTS: DIGESTS_COLUMN}

_MAX_BYTES = 2**30


@dataclass(frozen=True, eq=False)
class ColumnFolder:
    """Columns of documents; see the module.

    Attributes:
        path: of the folder.
        columns: by name.
        documents: fingerprint of the documents that they belong to.
        parts: path of the files of each part without suffix, with its documents and tokens.
        objects: its files by path if they are in an object store.
    """

    path: str
    columns: Mapping[str, Column]
    documents: Any
    parts: Sequence[tuple[str, int, int]]
    objects: Mapping[str, StoredObject] | None

    @classmethod
    def open(cls, path: Any) -> ColumnFolder:
        """Open a folder that :func:`~energon_ext.prepare.columns.write_columns` wrote.

        Raises:
            ConfigError: there is none, or it is incomplete.
        """
        name = str(as_msc(path)).rstrip("/") if is_remote(path) else file_name(path)
        file = f"{name}/{PREPARED}"
        try:
            content = read_object(file) if is_remote(name) else read_data(file, _MAX_BYTES)
        except (FileNotFoundError, NotADirectoryError):
            content = None
        if content is None:
            raise ConfigError(f"{name}: has no {PREPARED}; columns are written by write_columns.")
        prepared = parse_prepared(content, name)
        columns, files = columns_in(prepared.options, file), prepared.files
        if "documents" not in prepared.options:
            raise ConfigError(f"{file}: not written by write_columns.")
        parts = [(prefix, *counts) for prefix, counts in prepared.counts.items()]
        objects = files if is_remote(name) else None
        found = cls(name, columns, prepared.options["documents"], parts, objects)
        found._check_sizes(files)
        return found

    def __len__(self) -> int:
        return int(self._first_documents[-1])

    def _check_sizes(self, files: Mapping[str, StoredObject]) -> None:
        """Raise ConfigError if a file is missing or cut."""
        for prefix, documents, tokens in self.parts:
            for name, column in {**self.columns, **OWN_FILES}.items():
                path = prefix + suffix_of(name)
                size = files[path].size if path in files else None
                if self.objects is None:
                    size = os.path.getsize(path) if os.path.exists(path) else None
                check_size(path, size, column, tokens if column.per == "token" else documents)

    def check_documents(self, documents: Documents, where: str) -> None:
        """Raise ConfigError unless the columns belong to these documents."""
        if documents.fingerprint() != self.documents:
            raise ConfigError(
                f"{where}: {self.path} has columns of {self.documents.get('documents')} other "
                f"documents; write them again for these {len(documents)}."
            )

    def check_tokens(self, documents: Documents, numbers: Sequence[int]) -> None:
        """Raise ConfigError if the tokens of a document are not those the columns were made of.

        Each document is read as a whole once in a process.
        """
        new = sorted({number for number in numbers if not self._checked[number]})
        if not new:
            return
        lengths = documents.lengths(np.array(new, np.int64)).tolist()
        tokens = documents.read(new, [0] * len(new), lengths, (TOKENS,))[TOKENS]
        for number, each, digest in zip(new, tokens, self.digests(new)):
            if digest_of_tokens(each) != digest:
                raise ConfigError(
                    f"{self.path}: its columns were made of other tokens of document {number}; "
                    f"write them again for these documents."
                )
        self._checked[new] = True

    @functools.cached_property
    def _checked(self) -> np.ndarray:
        return np.zeros(len(self), bool)

    def digests(self, numbers: Sequence[int]) -> list[int]:
        """Return the checksum of the tokens that the columns of each document were made of."""
        parts = np.searchsorted(self._first_documents, np.asarray(numbers), side="right") - 1
        local = np.asarray(numbers) - self._first_documents[parts]
        places = zip(parts.tolist(), local.tolist())
        return [int(_open(self, part, DIGESTS)[place]) for part, place in places]

    @functools.cached_property
    def _first_documents(self) -> np.ndarray:
        return np.concatenate([[0], np.cumsum([documents for _, documents, _ in self.parts])])

    def read(
        self, name: str, numbers: Sequence[int], starts: Sequence[int], stops: Sequence[int]
    ) -> list[np.ndarray]:
        """Return the values of pieces: ``[stop - start, *item]``, or ``[*item]`` per document."""
        found: list[Any] = [None] * len(numbers)
        for place, values, part in self._find(name, numbers, starts, stops):
            found[place] = values[part] if self.columns[name].per == "token" else values[part][0]
        return found

    def prefetch(
        self, name: str, numbers: Sequence[int], starts: Sequence[int], stops: Sequence[int]
    ) -> None:
        """Ask the store for values that will be read soon, if it takes long."""
        if self.objects is not None:
            for _, values, part in self._find(name, numbers, starts, stops):
                assert isinstance(values, RemoteTokens)
                values.prefetch(part)

    def _find(
        self, name: str, numbers: Sequence[int], starts: Sequence[int], stops: Sequence[int]
    ) -> Iterator[tuple[int, Numbers, slice]]:
        """Yield the place of each piece, the values of its part, and which of them are its own."""
        parts = np.searchsorted(self._first_documents, np.asarray(numbers), side="right") - 1
        for place, part in enumerate(parts.tolist()):
            local = int(numbers[place] - self._first_documents[part])
            values = _open(self, part, name)
            if self.columns[name].per == "document":
                yield place, values, slice(local, local + 1)
                continue
            ends = _open(self, part, ENDS)
            begin = int(ends[local - 1]) if local else 0
            if begin + stops[place] > ends[local]:
                raise ConfigError(
                    f"{self.path}: document {numbers[place]} has {int(ends[local]) - begin} values "
                    f"of {name}, but {stops[place]} tokens; write them again."
                )
            yield place, values, slice(begin + starts[place], begin + stops[place])


def digest_of_tokens(tokens: np.ndarray) -> int:
    """Return a checksum of the tokens of a document, whatever their type."""
    return zlib.crc32(tokens.astype("<i8").tobytes())


@functools.lru_cache(MAX_MAPS)
def _open(folder: ColumnFolder, part: int, name: str) -> Any:
    """Open a file of a part; in an object store, the further ones are copied."""
    prefix, documents, tokens = folder.parts[part]
    column = OWN_FILES.get(name) or folder.columns[name]
    path, count = prefix + suffix_of(name), tokens if column.per == "token" else documents
    stored = None if folder.objects is None else folder.objects[path]
    return open_column(path, column, count, stored, is_copied=name in OWN_FILES)
