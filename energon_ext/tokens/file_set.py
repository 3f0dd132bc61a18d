# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Documents of one or thousands of ``.bin``/``.idx`` pairs, by number."""

import functools
import hashlib
from bisect import bisect_right
from pathlib import Path
from typing import Any, Iterator, Mapping, Sequence
from weakref import WeakSet

import numpy as np

from energon_ext.errors import ConfigError, StoreError
from energon_ext.keyed import KeyedPermutation
from energon_ext.storage.object_store import file_name, is_remote, local_copy
from energon_ext.storage.range_reader import RemoteTokens, range_reader
from energon_ext.tokens.base import Documents
from energon_ext.tokens.index import (
    Numbers,
    Pair,
    check_index,
    open_index,
    open_label_weights,
    open_tokens,
    read_pair,
)
from energon_ext.tokens.paths import pair_prefixes
from energon_ext.tokens.remote_pairs import remote_pairs

#: Tokens checked for ids outside the vocabulary, and the most files they are taken from.
_CHECKED_TOKENS = 1 << 20
_CHECKED_FILES = 64

#: Documents whose place and length enter the fingerprint; those whose tokens do; tokens of each.
_FINGERPRINT_DOCUMENTS = 256
_FINGERPRINT_READ = 64
_FINGERPRINT_TOKENS = 32

_BEGIN_AND_END = np.arange(2)

_opened: WeakSet["TokenFiles"] = WeakSet()


class TokenFiles(Documents):
    """The documents of many ``.bin``/``.idx`` pairs, numbered from the first pair to the last.

    Opening checks the indices. The tokens of a file are mapped when one of its documents is read;
    neither tokens nor places of documents are copied. A place is the number of the document's
    first token, counted over all pairs.

    Args:
        prefixes: paths without suffix, or pairs in an object store, whose indices are checked on
            first use. Documents are numbered in this order.

    Raises:
        ConfigError: a file is missing, damaged, or does not match the others of its pair.
    """

    def __init__(self, prefixes: Sequence[str | Path | Pair]):
        self._pairs = [
            each if isinstance(each, Pair) else read_pair(str(each)) for each in prefixes
        ]
        self.prefixes = [pair.prefix for pair in self._pairs]
        self._unfetched = {n for n, pair in enumerate(self._pairs) if pair.objects is not None}
        self.is_remote = bool(self._unfetched)
        for pair in self._pairs:
            if pair.objects is None:
                check_index(pair)
        self._first_documents = _starts([pair.documents for pair in self._pairs])
        self._first_tokens = _starts([pair.tokens for pair in self._pairs])
        self._sequences = np.array([pair.sequences for pair in self._pairs], np.int64)
        self._token_bytes = np.array([pair.dtype.itemsize for pair in self._pairs], np.int64)
        self._place_bounds: list[int] = self._first_tokens[:-1].tolist()
        self._has_weights = any(pair.weights_dtype is not None for pair in self._pairs)
        _opened.add(self)

    def __len__(self) -> int:
        return int(self._first_documents[-1])

    @property
    def num_tokens(self) -> int:
        return int(self._first_tokens[-1])

    def locate(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        numbers = np.asarray(numbers, np.int64)
        files = np.searchsorted(self._first_documents, numbers, side="right") - 1
        order = np.argsort(files, kind="stable")  # look up the documents of one pair together
        files = files[order]
        local = numbers[order] - self._first_documents[files]
        bounds = local[:, None] + _BEGIN_AND_END
        sequences, places = np.empty_like(bounds), np.empty_like(bounds)
        is_first = np.ones(len(files), bool)
        is_first[1:] = files[1:] != files[:-1]
        begins = np.flatnonzero(is_first)
        found, ends = files[begins].tolist(), [*begins[1:].tolist(), len(files)]
        self._fetch_indices(found)
        for file, begin, end in zip(found, begins.tolist(), ends):
            index = open_index(self._pairs[file])
            sequences[begin:end] = part = index.first_sequences[bounds[begin:end]]
            places[begin:end] = index.pointers[part]
        column = files[:, None]
        places //= self._token_bytes[column]
        places += self._first_tokens[column]
        # There is no pointer to the end of the last sequence of a file.
        is_end = sequences == self._sequences[column]
        np.copyto(places, self._first_tokens[column + 1], where=is_end)
        located = np.empty_like(places)
        located[order] = places
        return located[:, 0].copy(), located[:, 1] - located[:, 0]

    def tokens_in(self, first: int, stop: int) -> int:
        places, lengths = self.locate(np.array([first, stop - 1]))
        return int(places[1] + lengths[1] - places[0])  # documents are stored without gaps

    def _fetch_indices(self, files: list[int]) -> None:
        """Copy the indices of pairs in an object store, many in parallel."""
        wanted = self._unfetched.intersection(files)
        if wanted:
            objects = [pair.objects for pair in (self._pairs[file] for file in sorted(wanted))]
            range_reader().run_all(
                [functools.partial(local_copy, each[".idx"]) for each in objects if each]
            )
            self._unfetched -= wanted

    def prefetch(self, place: int, start: int, stop: int) -> None:
        pair, first = self._pair_at(place)
        part = slice(first + start, first + stop)
        _prefetch(open_tokens(pair), part)
        _prefetch(open_label_weights(pair), part)

    def tokens(self, place: int, start: int, stop: int) -> np.ndarray:
        pair, first = self._pair_at(place)
        return open_tokens(pair)[first + start : first + stop]

    def chunks(self, most: int) -> Iterator[np.ndarray]:
        """Yield the numbers of all documents in order, at most ``most`` of one pair at a time."""
        bounds = self._first_documents.tolist()
        for first, stop in zip(bounds, bounds[1:]):
            for begin in range(first, stop, most):
                yield np.arange(begin, min(begin + most, stop))

    def file_of(self, number: int) -> tuple[str, int]:
        """Return the prefix of a document's pair, and the document's number in the pair."""
        file = int(np.searchsorted(self._first_documents, number, side="right")) - 1
        return self.prefixes[file], number - int(self._first_documents[file])

    def document(self, index: int) -> np.ndarray:
        """Return the tokens of one document."""
        places, lengths = self.locate(np.array([index]))
        return self.tokens(int(places[0]), 0, int(lengths[0]))

    def label_weights(self, place: int, start: int, stop: int) -> np.ndarray | None:
        if not self._has_weights:
            return None
        pair, first = self._pair_at(place)
        weights = open_label_weights(pair)
        return None if weights is None else weights[first + start : first + stop].astype(np.float32)

    def fingerprint(self) -> dict[str, Any]:
        """Return counts, a hash of some places and lengths, and a hash of some tokens.

        It depends only on the documents and their order: not on how they are divided into pairs,
        on names and paths of the pairs, or on the bytes per token. The tokens come from the middle
        of 64 documents, which reveals different texts of equal lengths, but not one changed text
        among thousands.
        """
        sample = np.zeros(0, np.int64)
        if len(self):
            indices = np.arange(min(len(self), _FINGERPRINT_DOCUMENTS))
            sample = KeyedPermutation(len(self), "fingerprint")(indices)
        places, lengths = self.locate(sample)
        digest, read = hashlib.sha256(), hashlib.sha256()
        for numbers in (places, lengths):
            digest.update(numbers.astype("<i8").tobytes())
        middles = []
        for place, length in zip(places[:_FINGERPRINT_READ].tolist(), lengths.tolist()):
            start = max(0, (length - _FINGERPRINT_TOKENS) // 2)
            middles.append((place, start, min(length, start + _FINGERPRINT_TOKENS)))
        if self.is_remote:
            for middle in middles:
                self.prefetch(*middle)
        tokens = [self.tokens(*middle) for middle in middles]
        weights = [self.label_weights(*middle) for middle in middles]
        for parts, dtype in ((tokens, "<i8"), ([w for w in weights if w is not None], "<f4")):
            read.update(np.concatenate([np.zeros(0, dtype), *parts], dtype=dtype).tobytes())
        return {
            "documents": len(self),
            "tokens": self.num_tokens,
            "index": digest.hexdigest(),
            "sample": read.hexdigest(),
        }

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

        Fingerprints are compared for files that name their tokenizer. About a million ids from at
        most 64 files must be in ``[0, vocab_size)``.
        """
        self.check_written("tokenizer", name, fingerprint)
        checked = self._pairs[:: -(-len(self._pairs) // _CHECKED_FILES)]
        part = slice(0, _CHECKED_TOKENS // max(1, len(checked)))
        for pair in checked:
            _prefetch(open_tokens(pair), part)
        for pair in checked:
            tokens = open_tokens(pair)[part]
            for token in (int(tokens.min(initial=0)), int(tokens.max(initial=0))):
                if not 0 <= token < vocab_size:
                    raise ConfigError(
                        f"{pair.prefix}: contains token id {token}, but the tokenizer {name} has "
                        f"{vocab_size} ids; use the tokenizer that the file was written with."
                    )

    def check_written(self, what: str, name: str, now: Mapping[str, Any]) -> None:
        """Raise ConfigError if a file names a different tokenizer or chat template."""
        field, option = what.replace(" ", "_"), what.replace(" ", "-")
        for pair in self._pairs:
            meta = pair.meta or {}
            written = meta.get(field, now)
            if written == now:
                continue
            before = written if isinstance(written, Mapping) else {}
            differing = [key for key in {**now, **before} if before.get(key) != now.get(key)]
            differences = ", ".join(
                f"{key} {before.get(key)!s:.12}, now {now.get(key)!s:.12}" for key in differing[:3]
            )
            arguments = meta.get(f"{field}_arguments")
            used = arguments.get("name_or_path") if isinstance(arguments, Mapping) else None
            written_with = f"the {what} {used}" if used else f"a different {what}"
            raise ConfigError(
                f"{pair.prefix}: written with {written_with}, but {name} is used to read it "
                f"({differences}); pass --{option} {used or 'NAME'}, as it was written."
            )

    @property
    def unweighted(self) -> str | None:
        """Prefix of the first pair with tokens but no label weights; None if there is none."""
        bare = (pair.prefix for pair in self._pairs if pair.tokens and pair.weights_dtype is None)
        return next(bare, None)

    def _pair_at(self, place: int) -> tuple[Pair, int]:
        """Return the pair that contains a place, and the place relative to the pair."""
        file = bisect_right(self._place_bounds, place) - 1
        return self._pairs[file], place - self._place_bounds[file]

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenFiles, (self._pairs if self.is_remote else self.prefixes,)


def open_token_files(path: Any) -> TokenFiles:
    """Open the documents that a path names; ConfigError if a pair is missing or incomplete.

    Args:
        path: a pair with or without suffix, a folder with pairs in it or below it, or a pattern
            such as ``web/*/part-*``.
    """
    name = file_name(path)
    if not is_remote(name):
        return TokenFiles(pair_prefixes(name))
    try:
        return TokenFiles(remote_pairs(name))
    except StoreError as error:
        raise ConfigError(str(error)) from error


def check_open_files() -> None:
    """Raise ConfigError if a file was truncated since this process opened it."""
    for files in list(_opened):
        for prefix in () if files.is_remote else files.prefixes:
            read_pair(prefix)


def _prefetch(numbers: Numbers | None, part: slice) -> None:
    if isinstance(numbers, RemoteTokens):
        numbers.prefetch(part)


def _starts(counts: list[int]) -> np.ndarray:
    """Return the starts of consecutive parts, and the end of the last one."""
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
