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
            empty = candidates[~self._are_trained(begin, whole, lengths, candidates)]
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

    def _are_trained(
        self, first: int, whole: np.ndarray, lengths: np.ndarray, candidates: np.ndarray
    ) -> np.ndarray:
        """Return True for each candidate that has a trained label, bool [candidates].

        Args:
            first: number of the first of consecutive documents.
            whole, lengths: their tokens, before and after cutting.
            candidates: which of them to check.
        """
        is_trained = lengths[candidates] > 1  # nothing predicts the first token of a document
        checked = candidates[is_trained]
        if checked.size:
            begins = np.cumsum(whole)[checked] - whole[checked]
            begins -= begins[0]
            bounds = np.stack([begins + 1, begins + lengths[checked]], axis=1).reshape(-1)
            read = self.files.read_stretch(first + int(checked[0]), first + int(checked[-1]) + 1)
            tokens, weights = (None if each is None else each[: bounds[-1]] for each in read)
            trained = np.ones(bounds[-1], bool) if weights is None else weights > 0
            if self._untrained is not None:
                trained &= tokens != self._untrained
            # Bounds are [begin, end, begin, end, ...]; the last end is the end of the array.
            is_trained[is_trained] = np.logical_or.reduceat(trained, bounds[:-1])[::2]
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
