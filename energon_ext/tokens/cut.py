# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Conversations cut to the length of a row, or empty if nothing in that row is trained."""

from typing import Any

import numpy as np

from energon_ext.errors import ConfigError, log_of
from energon_ext.tokens.documents import Documents, Lengths

logger = log_of(__name__)

#: What happens to a document that is longer than a row.
OVER_LONG = ("cut", "drop", "error")

#: Consecutive documents longer than a row that stop a run with ``error``.
_MAX_IN_A_ROW = 100

#: Documents checked per chunk.
_CHUNK = 512


class CutLengths(Lengths):
    """The lengths of tokenized documents, each at most as long as a row.

    A document without a trained label in its first ``max_tokens`` tokens has length 0. The
    constructor finds these documents: it checks all of them if ``untrained`` is given, else only
    those that are cut.

    Args:
        source: key of the source, for messages.
        max_tokens: T + 1 for rows of T positions.
        over_long: ``cut`` keeps the first tokens of a longer document; ``drop`` and ``error`` leave
            it out, with length 0, and count it.
        untrained: a token that is never trained as a label; None if there is none.

    Raises:
        ConfigError: with ``error``, 100 documents in a row are longer than a row.
    """

    def __init__(
        self,
        files: Documents,
        *,
        source: str,
        max_tokens: int,
        over_long: str,
        untrained: int | None = None,
    ):
        self.files = files
        self._max_tokens = max_tokens
        self._untrained = untrained
        untrainable, too_long = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        self.num_tokens = in_a_row = 0
        for begin in range(0, len(files), _CHUNK):
            numbers = np.arange(begin, min(begin + _CHUNK, len(files)))
            lengths = whole = files.lengths(numbers)
            is_long = whole > max_tokens
            if over_long != "cut":
                too_long.append(numbers[is_long])
                lengths = np.where(is_long, 0, whole)
            if over_long == "error":
                in_a_row = self._check_in_a_row(source, numbers, is_long, in_a_row)
            lengths = np.minimum(lengths, max_tokens)
            is_cut = is_long & (lengths > 0)
            candidates = np.flatnonzero(is_cut if untrained is None else lengths > 0)
            is_trained = self._are_trained(numbers[candidates], lengths[candidates])
            empty = candidates[~is_trained]
            lengths[empty] = 0
            untrainable.append(numbers[empty])
            self.num_tokens += int(lengths.sum())
        self._omitted = np.concatenate([*untrainable, *too_long])
        if sum(map(len, too_long)):
            first = int(np.concatenate(too_long)[0])
            prefix, number, _ = files.origin(first)
            logger.warning(
                "%s: %d of %d documents have more than the %d tokens of a row and are left out; "
                "the first is %s:%d (number %d in %s).",
                *(source, sum(map(len, too_long)), len(files), max_tokens, source, first),
                *(number, prefix),
            )
        if sum(map(len, untrainable)):
            first = int(np.concatenate(untrainable)[0])
            logger.warning(
                "%s: %d of %d documents have no trained label in their first %d tokens and are "
                "excluded; the first is %s:%d.",
                *(source, sum(map(len, untrainable)), len(files), max_tokens, source, first),
            )

    def _check_in_a_row(
        self, source: str, numbers: np.ndarray, is_long: np.ndarray, in_a_row: int
    ) -> int:
        """Return the length of the run of long documents that is open at the end of a chunk."""
        for number, is_too_long in zip(numbers.tolist(), is_long.tolist()):
            in_a_row = in_a_row + 1 if is_too_long else 0
            if in_a_row == _MAX_IN_A_ROW:
                raise ConfigError(
                    f"{source}: {_MAX_IN_A_ROW} documents in a row, up to document {number}, have "
                    f"more than the {self._max_tokens} tokens of a row; use a larger seq_len, "
                    f"over_long='cut' or over_long='drop'."
                )
        return in_a_row

    def _are_trained(self, numbers: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Return whether each document, cut to a length, has a trained label, bool [n]."""
        is_trained = lengths > 1  # nothing predicts the first token of a document
        if is_trained.any():
            stops = lengths[is_trained]
            firsts = [1] * len(stops)
            tokens, weights = self.files.read(numbers[is_trained].tolist(), firsts, stops.tolist())
            trained = np.concatenate(
                [np.ones(len(t), bool) if w is None else w > 0 for t, w in zip(tokens, weights)]
            )
            if self._untrained is not None:
                trained &= np.concatenate(tokens) != self._untrained
            begins = np.cumsum(stops - 1) - (stops - 1)
            is_trained[is_trained] = np.logical_or.reduceat(trained, begins)
        return is_trained

    def __len__(self) -> int:
        return len(self.files)

    def tokens_in(self, first: int, stop: int) -> int:
        return self.num_tokens if stop - first == len(self) else super().tokens_in(first, stop)

    def lengths(self, numbers: np.ndarray) -> np.ndarray:
        lengths = np.minimum(self.files.lengths(numbers), self._max_tokens)
        lengths[np.isin(numbers, self._omitted)] = 0
        return lengths

    @property
    def is_large(self) -> bool:
        return self.files.is_large

    def request(self, numbers: np.ndarray) -> None:
        self.files.request(numbers)

    def fingerprint(self) -> dict[str, Any]:
        return self.files.fingerprint()
