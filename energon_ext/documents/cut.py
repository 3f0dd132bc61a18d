# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Conversations as rows take them: cut to a row, or without a token where nothing is trained."""

import numpy as np

from energon_ext.documents.file_set import TokenFiles
from energon_ext.errors import ConfigError, log_of

logger = log_of(__name__)

#: Documents that are looked at together.
_CHUNK = 512


class CutDocuments:
    """The documents of token files, each at most as long as a row.

    A document of which nothing is trained within a row has no token here. They are looked for once:
    among those that are too long, and among all where a label is never trained.

    Args:
        source: key of the source, for messages.
        most_tokens: T + 1 of rows of T positions.
        over_long: ``cut`` keeps the first tokens of a longer document, ``error`` refuses it.
        untrained: a token that is never trained as a label; None for no such token.
    """

    def __init__(
        self,
        files: TokenFiles,
        *,
        source: str,
        most_tokens: int,
        over_long: str,
        untrained: int | None = None,
    ):
        self.files = files
        # A cut document differs in its length alone.
        self.tokens, self.label_weights = files.tokens, files.label_weights
        self.fingerprint = files.fingerprint
        self.is_remote, self.expect = files.is_remote, files.expect
        self.file_of, self.document = files.file_of, files.document
        self._most = most_tokens
        self._untrained = untrained
        dropped = [np.zeros(0, np.int64)]
        self.num_tokens = 0
        for numbers in files.chunks(_CHUNK):
            places, lengths = files.locate(numbers)
            is_long = lengths > most_tokens
            if over_long == "error" and is_long.any():
                raise self._too_long(source, int(numbers[is_long][0]), int(lengths[is_long][0]))
            lengths = np.minimum(lengths, most_tokens)
            looked_at = np.flatnonzero(is_long if untrained is None else lengths > 0)
            untrainable = looked_at[~self._are_trained(places[looked_at], lengths[looked_at])]
            lengths[untrainable] = 0
            dropped.append(numbers[untrainable])
            self.num_tokens += int(lengths.sum())
        self._dropped = np.concatenate(dropped)
        if self._dropped.size:
            logger.warning(
                "%s: %d of %d documents have no trained label in their first %d tokens; they are "
                "left out, the first: document %d.",
                *(source, self._dropped.size, len(files), most_tokens, self._dropped[0]),
            )

    def _too_long(self, source: str, number: int, length: int) -> ConfigError:
        prefix, place = self.files.file_of(number)
        return ConfigError(
            f"{source}: document {number} ({place} of {prefix}) has {length} tokens, and a row has "
            f"room for {self._most}; take a larger seq_len, or over_long='cut'."
        )

    def _are_trained(self, places: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """True where any label among the first tokens of some documents of one pair is trained."""
        found = lengths > 1  # nothing predicts the first token of a document
        places, lengths = places[found], lengths[found]
        if places.size:
            first = int(places[0])
            count = int(places[-1] + lengths[-1]) - first
            weights = self.files.label_weights(first, 0, count)
            trained = np.ones(count, bool) if weights is None else weights > 0
            if self._untrained is not None:
                trained &= self.files.tokens(first, 0, count) != self._untrained
            begins = places - first
            bounds = np.stack([begins + 1, begins + lengths], axis=1).reshape(-1)
            # Of [begin, end, begin, end, ...] without the last end, which is that of the array.
            found[found] = np.logical_or.reduceat(trained, bounds[:-1])[::2]
        return found

    def __len__(self) -> int:
        return len(self.files)

    def locate(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """As :meth:`energon_ext.documents.base.Documents.locate`."""
        places, lengths = self.files.locate(numbers)
        lengths = np.minimum(lengths, self._most)
        lengths[np.isin(numbers, self._dropped)] = 0
        return places, lengths
