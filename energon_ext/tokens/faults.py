# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Looks for everything that is wrong with pairs, instead of raising at the first fault."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from energon_ext.batch.columns import LABEL_WEIGHTS
from energon_ext.errors import ConfigError
from energon_ext.tokens.catalog import Stamp, check_pair
from energon_ext.tokens.index import Pair, open_index, open_pair_column, open_tokens, read_pair
from energon_ext.tokens.paths import half_of

#: Tokens that are read at once.
_CHUNK = 1 << 22

#: Called with the number of bytes read since the last call.
Advance = Callable[[int], None]


@dataclass
class Report:
    """The faults of a pair, one line each; the pair and its stamp if there are none."""

    faults: list[str] = field(default_factory=list)
    checked: tuple[Pair, Stamp] | None = None


def examine_pair(
    prefix: str, files: set[str], *, tokens: bool, vocab_size: int | None, advance: Advance
) -> Report:
    """Look for all faults of a pair: sizes, gaps and bounds, and with ``tokens`` every token.

    Args:
        files: suffixes of its files, see :func:`~energon_ext.tokens.paths.list_files`.
        tokens: whether to read all tokens and label weights.
        vocab_size: exclusive limit of the token ids; by default that of its ``.meta.json``.
    """
    if fault := half_of(prefix, files):
        return Report([fault])
    report = Report()
    try:
        pair = read_pair(prefix, files)
    except ConfigError as error:
        return Report([str(error)])
    try:
        report.checked = check_pair(prefix, files, advance)
    except ConfigError as error:
        report.faults.append(str(error))
    if tokens:
        report.faults += _token_faults(pair, vocab_size or vocabulary_of(pair), advance)
        report.faults += _weight_faults(pair, advance)
    return report


def vocabulary_of(pair: Pair) -> int | None:
    """Return the size of the vocabulary that the ``.meta.json`` of a pair names."""
    size = (pair.meta or {}).get("vocab_size")
    return size if isinstance(size, int) else None


def _token_faults(pair: Pair, vocab_size: int | None, advance: Advance) -> Iterator[str]:
    """Yield the first token id that the vocabulary does not have."""
    allowed = "any" if vocab_size is None else vocab_size - 1
    for begin, part in _parts(open_tokens(pair), advance):
        wrong = part < 0
        if vocab_size is not None and vocab_size <= np.iinfo(pair.dtype).max:
            wrong |= part >= vocab_size
        if wrong.any():
            place = begin + int(wrong.argmax())
            yield (
                f"{pair.prefix}.bin: token id {part[place - begin]} at "
                f"{_document_at(pair, place)}; ids from 0 to {allowed} are needed, write the pair "
                f"again with its tokenizer."
            )
            return


def _weight_faults(pair: Pair, advance: Advance) -> Iterator[str]:
    """Yield the first label weight that is no number from 0 on."""
    weights = open_pair_column(pair, LABEL_WEIGHTS)
    for begin, part in () if weights is None else _parts(weights, advance):
        wrong = ~(np.isfinite(part) & (part >= 0))
        if wrong.any():
            place = begin + int(wrong.argmax())
            yield (
                f"{pair.prefix}.weights.bin: weight {part[place - begin]} at "
                f"{_document_at(pair, place)}; a finite number >= 0 is needed, write it again."
            )
            return


def _parts(numbers: Any, advance: Advance) -> Iterator[tuple[int, np.ndarray]]:
    for begin in range(0, len(numbers), _CHUNK):
        part = numbers[begin : begin + _CHUNK]
        yield begin, part
        advance(part.nbytes)


def _document_at(pair: Pair, place: int) -> str:
    """Return the document that contains a token, for messages."""
    index = open_index(pair)
    pointers = index.pointers[: pair.sequences]
    sequence = int(np.searchsorted(pointers, place * pair.dtype.itemsize, side="right")) - 1
    document = int(np.searchsorted(index.first_sequences, sequence, side="right")) - 1
    return f"token {place} (document {document})"


def tokenizer_faults(pairs: Sequence[Pair]) -> list[str]:
    """Return a fault if pairs of one source were written with different tokenizers."""
    first: tuple[str, Any] | None = None
    for pair in pairs:
        written = (pair.meta or {}).get("tokenizer")
        if written is None:
            continue
        if first is None:
            first = pair.prefix, written
        elif written != first[1]:
            return [
                f"{pair.prefix}.meta.json: names a tokenizer other than {first[0]}.meta.json; "
                f"pairs of one source need one tokenizer, so write them again or name them apart."
            ]
    return []
