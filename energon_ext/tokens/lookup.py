# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Look up documents of a pair: their lengths, which a plan needs, and where they begin."""

from functools import lru_cache

import numpy as np

from energon_ext.errors import ConfigError
from energon_ext.storage.file_map import SMALL_BYTES, Pages
from energon_ext.tokens.index import MAX_MAPS, Pair, open_index

#: Documents checked at once, few enough for the cache of a core.
_CHUNK = 1 << 16


@lru_cache(MAX_MAPS)
def _has_one_sequence_each(pair: Pair) -> bool:
    """Return whether each document of a pair is one sequence, as `energon-ext prepare` writes."""
    if pair.one_sequence_each is not None:
        return pair.one_sequence_each
    firsts = open_index(pair).first_sequences
    return pair.sequences == pair.documents and all(
        np.array_equal(part, np.arange(begin, begin + len(part)))
        for begin in range(0, len(firsts), _CHUNK)
        for part in [firsts[begin : begin + _CHUNK]]
    )


@lru_cache(MAX_MAPS)
def _pages_of_lengths(pair: Pair) -> Pages:
    return Pages(open_index(pair).lengths)


@lru_cache(MAX_MAPS)
def _pages_of_pointers(pair: Pair) -> Pages:
    return Pages(open_index(pair).pointers)


def has_large_index(pair: Pair) -> bool:
    """Return True if the index of a pair is too large to be read around each document."""
    return pair.objects is None and 4 * pair.sequences >= SMALL_BYTES


def request_lengths(pair: Pair, numbers: np.ndarray) -> None:
    """Request the parts of the index that :func:`document_lengths` will read."""
    if _has_one_sequence_each(pair):
        _pages_of_lengths(pair).request(numbers)


def document_lengths(pair: Pair, numbers: np.ndarray) -> np.ndarray:
    """Return the tokens of documents of a pair, int64 [n].

    Reads four bytes per document where each is one sequence.
    """
    if _has_one_sequence_each(pair):
        return open_index(pair).lengths[numbers].astype(np.int64)
    return _first_tokens(pair, numbers + 1) - _first_tokens(pair, numbers)


def first_tokens(pair: Pair, numbers: np.ndarray, planned: np.ndarray | None = None) -> np.ndarray:
    """Return the number of the first token of documents in their pair, int64 [n].

    Args:
        planned: the lengths by which they were planned, if these are not from the index.

    Raises:
        ConfigError: the index gives a document another length elsewhere, or a place outside the
            file, so it was damaged after it was checked.
    """
    if _has_one_sequence_each(pair):
        _pages_of_pointers(pair).request(numbers)
        firsts = _agreeing_firsts(pair, numbers, planned)
        if firsts is not None:
            return firsts
    firsts, ends = _first_tokens(pair, numbers), _first_tokens(pair, numbers + 1)
    wrong = (firsts < 0) | (ends > pair.tokens)
    wrong |= ends - firsts != document_lengths(pair, numbers)
    if planned is not None:
        wrong |= ends - firsts != planned
    if wrong.any():
        raise ConfigError(
            f"{pair.prefix}.idx: damaged, document {numbers[wrong.argmax()]} has two lengths or is "
            f"not in {pair.prefix}.bin; write the pair again."
        )
    return firsts


def _agreeing_firsts(
    pair: Pair, numbers: np.ndarray, planned: np.ndarray | None
) -> np.ndarray | None:
    """Return the first tokens of documents of one sequence; None if the arrays do not agree.

    This is the usual case in fewer steps. They do not agree if the last sequence is among them,
    since there is no pointer to its end.
    """
    index, token_bytes = open_index(pair), pair.dtype.itemsize
    begins, lengths = index.pointers[numbers], index.lengths[numbers]
    sizes = index.pointers[numbers + 1] - begins
    are_equal = (sizes == lengths * np.int64(token_bytes)).all()
    if planned is not None:
        are_equal &= (lengths == planned).all()
    rest = pair.tokens * token_bytes - (begins + sizes)
    are_inside = (begins | rest).min(initial=0) >= 0  # `|` is negative where one of the two is
    return begins // token_bytes if are_equal and are_inside else None


def _first_tokens(pair: Pair, numbers: np.ndarray) -> np.ndarray:
    index = open_index(pair)
    is_one_each = _has_one_sequence_each(pair)
    sequences = numbers if is_one_each else index.first_sequences[numbers]
    firsts = index.pointers[sequences] // pair.dtype.itemsize
    # There is no pointer to the end of the last sequence.
    return np.where(sequences == pair.sequences, pair.tokens, firsts)
