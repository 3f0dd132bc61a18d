# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Documents of one or thousands of ``.bin``/``.idx`` pairs, by number."""

import functools
from pathlib import Path
from typing import Any, Collection, Iterator, Mapping, Sequence

import numpy as np

from energon_ext.batch.columns import (
    LABEL_WEIGHTS,
    TOKENS,
    Column,
    columns_to_json,
    foreign_id,
)
from energon_ext.errors import ConfigError, StoreError
from energon_ext.keyed import sha256
from energon_ext.storage.checked_array import CheckedArray
from energon_ext.storage.file_map import Pages, request_slices
from energon_ext.storage.object_store import file_name, is_remote, local_copy
from energon_ext.storage.range_reader import RemoteTokens, range_reader
from energon_ext.tokens.catalog import describe_pairs
from energon_ext.tokens.documents import (
    FINGERPRINT_READ,
    Documents,
    FileFacts,
    Origin,
    sample_numbers,
    watched,
)
from energon_ext.tokens.index import (
    SHUFFLED,
    Numbers,
    Pair,
    open_pair_column,
    open_tokens,
    read_pair,
)
from energon_ext.tokens.lookup import (
    document_lengths,
    first_tokens,
    has_large_index,
    request_lengths,
)
from energon_ext.tokens.meta import check_written
from energon_ext.tokens.opening import check_now, open_pairs
from energon_ext.tokens.origins import origins_of
from energon_ext.tokens.paths import list_pairs
from energon_ext.tokens.remote_pairs import remote_pairs
from energon_ext.tokens.unchanged import Share

#: Tokens checked for ids outside the vocabulary, and the most files they are taken from.
_CHECKED_TOKENS = 1 << 20
_CHECKED_FILES = 16

#: Sources with fewer tokens are soon in memory as a whole, so that requests would only take time.
LARGE_TOKENS = 1 << 25


class TokenFiles(Documents):
    """The documents of many ``.bin``/``.idx`` pairs, numbered from the first pair to the last.

    Opening checks the indices of pairs that are given by their paths. The tokens of a file are
    mapped when one of its documents is read; neither tokens nor lengths are copied.

    Args:
        prefixes: paths without suffix, or pairs: those that were checked, or those in an object
            store, which are checked on first use. Documents are numbered in this order.
        lengths: tokens of each document, uint32 [documents]; None to read them from the indices.
        digests: SHA-256 of the index of each pair; None if they are not known yet.

    Raises:
        ConfigError: a file is missing, damaged, or does not match the others of its pair.
    """

    def __init__(
        self,
        prefixes: Sequence[str | Path | Pair],
        lengths: CheckedArray | None = None,
        digests: Sequence[str] | None = None,
    ):
        self._pairs = [
            each if isinstance(each, Pair) else check_now(read_pair(str(each))) for each in prefixes
        ]
        self.prefixes = [pair.prefix for pair in self._pairs]
        self._unfetched = {n for n, pair in enumerate(self._pairs) if pair.objects is not None}
        self.is_remote = bool(self._unfetched)
        self._first_documents = _starts([pair.documents for pair in self._pairs])
        self._first_tokens = _starts([pair.tokens for pair in self._pairs])
        self._has_many_tokens = self.num_tokens >= LARGE_TOKENS and not self.is_remote
        self._lengths, self._digests = lengths, digests
        self._pages = None if lengths is None else Pages(lengths.items)
        watched.add(self)

    def __len__(self) -> int:
        return int(self._first_documents[-1])

    @property
    def num_tokens(self) -> int:
        return int(self._first_tokens[-1])

    def lengths(self, numbers: np.ndarray) -> np.ndarray:
        numbers = np.asarray(numbers, np.int64)
        if self._lengths is not None:
            return self._lengths[numbers].astype(np.int64)
        lengths = np.empty(len(numbers), np.int64)
        for pair, where, local in self._by_pair(numbers):
            lengths[where] = document_lengths(pair, local)
        return lengths

    @functools.cached_property
    def is_large(self) -> bool:
        if self._pages is not None:
            return not self._pages.is_small
        return any(has_large_index(pair) for pair in self._pairs)

    def request(self, numbers: np.ndarray) -> None:
        if self._pages is not None:
            self._pages.request(numbers)
        elif self.is_large:
            for pair, _, local in self._by_pair(np.asarray(numbers, np.int64)):
                request_lengths(pair, local)

    def places(self, numbers: np.ndarray) -> np.ndarray:
        """Return the number of the first token of each document over all pairs, int64 [n]."""
        numbers = np.asarray(numbers, np.int64)
        places = np.empty(len(numbers), np.int64)
        for pair, where, local in self._by_pair(numbers):
            planned = None if self._lengths is None else self._lengths[numbers[where]]
            places[where] = first_tokens(pair, local, planned)
        if len(self._pairs) == 1:
            return places
        return places + self._first_tokens[self._files_of(numbers)]

    def tokens_in(self, first: int, stop: int) -> int:
        if first >= stop:
            return 0
        bounds = np.array([first, stop - 1])
        places, lengths = self.places(bounds), self.lengths(bounds)
        return int(places[1] + lengths[1] - places[0])  # documents are stored without gaps

    def _files_of(self, numbers: np.ndarray) -> np.ndarray:
        """Return the index of the pair of each document."""
        if len(self._pairs) == 1:
            return np.zeros(len(numbers), np.int64)
        return np.searchsorted(self._first_documents, numbers, side="right") - 1

    def _by_pair(self, numbers: np.ndarray) -> Iterator[tuple[Pair, Any, np.ndarray]]:
        """Yield each pair that has some of the documents, which they are, and their numbers in it.

        The documents of one pair are looked up together.
        """
        if not len(numbers):
            return
        if len(self._pairs) == 1:
            self._fetch_indices([0])
            yield self._pairs[0], slice(None), numbers
            return
        files = self._files_of(numbers)
        order = np.argsort(files, kind="stable")
        begins = np.flatnonzero(np.diff(files[order], prepend=-1))
        found = files[order[begins]].tolist()
        self._fetch_indices(found)
        for file, where in zip(found, np.split(order, begins[1:])):
            yield self._pairs[file], where, numbers[where] - self._first_documents[file]

    def _fetch_indices(self, files: list[int]) -> None:
        """Copy the indices of pairs in an object store, many in parallel."""
        wanted = self._unfetched.intersection(files)
        if wanted:
            objects = [pair.objects for pair in (self._pairs[file] for file in sorted(wanted))]
            range_reader().run_all(
                [functools.partial(local_copy, each[".idx"]) for each in objects if each]
            )
            self._unfetched -= wanted

    @functools.cached_property
    def columns(self) -> Mapping[str, Column]:
        first = _further_columns(self._pairs[0]) if self._pairs else {}
        for pair in self._pairs:
            if pair.meta is not self._pairs[0].meta and _further_columns(pair) != first:
                raise ConfigError(
                    f"{pair.prefix}: has the columns {columns_to_json(_further_columns(pair))}, "
                    f"but {self.prefixes[0]} has {columns_to_json(first)}; give all pairs of a "
                    f"source the same ones."
                )
        return first

    @functools.cached_property
    def _per_document(self) -> set[str]:
        """Names of its columns per document."""
        return {name for name, column in self.columns.items() if column.per == "document"}

    def _find(
        self, numbers: Sequence[int], starts: Sequence[int], stops: Sequence[int]
    ) -> Iterator[tuple[Pair, list[int], list[slice], np.ndarray]]:
        """Yield each pair with some pieces, which they are, their tokens and documents in it."""
        wanted = np.array(numbers, np.int64)
        for pair, where, local in self._by_pair(wanted):
            planned = None if self._lengths is None else self._lengths[wanted[where]]
            firsts = first_tokens(pair, local, planned).tolist()
            is_all = isinstance(where, slice)
            places = list(range(len(firsts))) if is_all else where.tolist()
            parts = [
                slice(first + starts[place], first + stops[place])
                for place, first in zip(places, firsts)
            ]
            yield pair, places, parts, local

    def read(
        self,
        numbers: Sequence[int],
        starts: Sequence[int],
        stops: Sequence[int],
        names: Collection[str] | None = None,
    ) -> dict[str, list[Any]]:
        wanted = (TOKENS, LABEL_WEIGHTS, *self.columns) if names is None else names
        read: dict[str, list[Any]] = {name: [None] * len(numbers) for name in wanted}
        for pair, places, parts, documents in self._find(numbers, starts, stops):
            for name, values in read.items():
                found = _open_numbers(pair, name)
                if found is None:
                    continue
                if self._per_document and name in self._per_document:
                    for place, number in zip(places, documents.tolist()):
                        values[place] = found[number : number + 1][0]
                    continue
                items = found.items if isinstance(found, CheckedArray) else found
                if self._has_many_tokens and isinstance(items, np.ndarray):
                    request_slices(items, parts)
                if name == LABEL_WEIGHTS:
                    for place, part in zip(places, parts):
                        values[place] = found[part].astype(np.float32)
                else:
                    for place, part in zip(places, parts):
                        values[place] = found[part]
        return read

    def read_stretch(self, first: int, stop: int) -> tuple[np.ndarray, np.ndarray | None]:
        files = self._files_of(np.array([first, stop - 1]))
        if files[0] != files[1]:
            return super().read_stretch(first, stop)
        part = [first], [0], [self.tokens_in(first, stop)]
        (tokens,), (weights,) = self.read(*part, (TOKENS, LABEL_WEIGHTS)).values()
        return tokens, weights

    def prefetch(self, numbers: Sequence[int], starts: Sequence[int], stops: Sequence[int]) -> None:
        if not self.is_remote:
            return
        for pair, _, parts, documents in self._find(numbers, starts, stops):
            for name in (TOKENS, LABEL_WEIGHTS, *self.columns):
                items = parts
                if name in self._per_document:
                    items = [slice(number, number + 1) for number in documents.tolist()]
                for item in items:
                    _prefetch(_open_numbers(pair, name), item)

    def tokens(self, number: int, start: int, stop: int) -> np.ndarray:
        (tokens,) = self.read([number], [start], [stop], (TOKENS,))[TOKENS]
        return tokens

    def label_weights(self, number: int, start: int, stop: int) -> np.ndarray | None:
        return self.values(LABEL_WEIGHTS, number, start, stop)

    def values(self, name: str, number: int, start: int, stop: int) -> np.ndarray | None:
        return self.read([number], [start], [stop], (name,))[name][0]

    def origin(self, number: int) -> Origin:
        (file,) = self._files_of(np.array([number])).tolist()
        prefix, local = self.prefixes[file], number - int(self._first_documents[file])
        origins = origins_of(prefix) or ()
        return Origin(prefix, local, origins[local] if local < len(origins) else None)

    def describe_files(self) -> list[FileFacts]:
        return describe_pairs(self._pairs, self._digests)

    def fingerprint(self) -> dict[str, Any]:
        """Return counts, a hash of some places and lengths, and a hash of some tokens.

        It depends only on the documents and their order: not on how they are divided into pairs,
        on names and paths of the pairs, or on the bytes per token.
        """
        sample = sample_numbers(len(self))
        columns = self.places(sample), self.lengths(sample)
        return {
            "documents": len(self),
            "tokens": self.num_tokens,
            "index": sha256(*(each.astype("<i8").tobytes() for each in columns)),
            "sample": self.digest_of_middles(sample[:FINGERPRINT_READ]),
        }

    @property
    def is_shuffled(self) -> bool:
        """True if all pairs are parts of one random order (``energon-ext prepare --shuffle``)."""
        orders = [(pair.meta or {}).get(SHUFFLED) for pair in self._pairs]
        return orders[0] is not None and all(order == orders[0] for order in orders)

    @property
    def names_tokenizer(self) -> bool:
        """True if every pair names the tokenizer that wrote it."""
        return all((pair.meta or {}).get("tokenizer") for pair in self._pairs)

    def written_with(self, field: str) -> tuple[str, Any]:
        """Return the first pair whose ``.meta.json`` has a field, as (prefix, value)."""
        found = ((pair.prefix, (pair.meta or {}).get(field)) for pair in self._pairs)
        return next((each for each in found if each[1] is not None), ("", None))

    def check_tokenizer(self, name: str, fingerprint: Mapping[str, Any], vocab_size: int) -> None:
        """Raise ConfigError if the files were evidently written with a different tokenizer.

        Fingerprints are compared for files that name their tokenizer. Of the others, about a
        million ids from at most 16 files must be in ``[0, vocab_size)``.
        """
        self.check_written("tokenizer", name, fingerprint)
        unnamed = [pair for pair in self._pairs if not (pair.meta or {}).get("tokenizer")]
        checked = unnamed[:: -(-len(unnamed) // _CHECKED_FILES) or 1]
        part = slice(0, _CHECKED_TOKENS // max(1, len(checked)))
        for pair in checked:
            _prefetch(open_tokens(pair), part)
        for pair in checked:
            tokens = open_tokens(pair)[part]
            if (token := foreign_id(tokens, vocab_size)) is not None:
                raise ConfigError(
                    f"{pair.prefix}: contains token id {token}, but the tokenizer {name} has "
                    f"{vocab_size} ids; use the tokenizer that the file was written with."
                )

    def check_written(self, what: str, name: str, now: Mapping[str, Any]) -> None:
        """Raise ConfigError if a file names a different tokenizer or chat template."""
        for pair in self._pairs:
            check_written(pair.prefix, pair.meta or {}, what, name, now)

    @property
    def unweighted(self) -> str | None:
        """Prefix of the first pair with tokens but no label weights; None if there is none."""
        bare = (p.prefix for p in self._pairs if p.tokens and LABEL_WEIGHTS not in p.columns)
        return next(bare, None)

    def check_files(self) -> None:
        for prefix in () if self.is_remote else self.prefixes:
            read_pair(prefix)

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenFiles, (self._pairs,)


def open_token_files(path: Any, share: Share | None = (0, 1)) -> TokenFiles:
    """Open the documents that a path names; ConfigError if a pair is missing or incomplete.

    Args:
        path: a pair with or without suffix, a folder with pairs in it or below it, or a pattern
            such as ``web/*/part-*``.
        share: number of this process, and of all that open the path together: each asks the file
            system about its share of many files. None to ask about none.
    """
    name = file_name(path)
    if not is_remote(name):
        return TokenFiles(*open_pairs(name, list_pairs(name), share))
    try:
        return TokenFiles(remote_pairs(name))
    except StoreError as error:
        raise ConfigError(str(error)) from error


def _further_columns(pair: Pair) -> dict[str, Column]:
    """Return the columns of a pair beside label weights, which pairs of a source may lack."""
    return {name: column for name, column in pair.columns.items() if name != LABEL_WEIGHTS}


def _open_numbers(pair: Pair, name: str) -> Numbers | None:
    """Open a column of a pair by its name; None if the pair has no label weights."""
    return open_tokens(pair) if name == TOKENS else open_pair_column(pair, name)


def _prefetch(numbers: Numbers | None, part: slice) -> None:
    if isinstance(numbers, RemoteTokens):
        numbers.prefetch(part)


def _starts(counts: list[int]) -> np.ndarray:
    """Return the starts of consecutive parts, and the end of the last one."""
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
