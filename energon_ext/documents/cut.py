# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Conversations as rows take them: cut to a row, or without a token where nothing is trained."""

import logging
from typing import Any

import numpy as np

from energon_ext.documents.base import Documents
from energon_ext.documents.file_set import TokenFiles
from energon_ext.errors import ConfigError

logger = logging.getLogger(__name__)

_CHUNK = 1 << 16


class CutDocuments(Documents):
    """The documents of token files, each at most as long as a row.

    A document of which nothing is trained within a row has no token here. They are looked for once:
    among those that are too long, and among all where a label is never trained.

    Args:
        files: with the weights of their labels.
        source: key of the source, for messages.
        most_tokens: T + 1 of rows of T positions.
        over_long: ``cut`` keeps the first tokens of a longer document, ``error`` refuses it.
        untrained: a token that is never trained as a label; None for no such token.

    Raises:
        ConfigError: a document is too long, with ``error``.
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
        self._most = most_tokens
        self._untrained = untrained
        dropped: list[int] = []
        total = 0
        for begin in range(0, len(files), _CHUNK):
            numbers = np.arange(begin, min(begin + _CHUNK, len(files)))
            places, lengths = files.locate(numbers)
            is_long = lengths > most_tokens
            if over_long == "error" and is_long.any():
                raise ConfigError(self._too_long(source, begin + int(is_long.argmax())))
            lengths = np.minimum(lengths, most_tokens)
            looked_at = is_long if untrained is None else lengths > 0
            for index in np.flatnonzero(looked_at).tolist():
                if not self._is_trained(int(places[index]), int(lengths[index])):
                    dropped.append(begin + index)
                    lengths[index] = 0
            total += int(lengths.sum())
        self._dropped = np.array(dropped, np.int64)
        self._num_tokens = total
        if dropped:
            logger.warning(
                "%s: %d of %d documents have no trained label in their first %d tokens; they are "
                "left out, the first: document %d.",
                *(source, len(dropped), len(files), most_tokens, dropped[0]),
            )

    def _too_long(self, source: str, number: int) -> str:
        length = int(self.files.locate(np.array([number]))[1][0])
        prefix, place = self.files.file_of(number)
        return (
            f"{source}: document {number} ({place} of {prefix}) has {length} tokens, and a row has "
            f"room for {self._most}; take a larger seq_len, or over_long='cut'."
        )

    def _is_trained(self, place: int, length: int) -> bool:
        """Whether any label of the first tokens of a document is trained."""
        trained = np.ones(length, bool)
        weights = self.files.label_weights(place, 0, length)
        if weights is not None:
            trained = weights > 0
        if self._untrained is not None:
            trained &= self.files.tokens(place, 0, length) != self._untrained
        return bool(trained[1:].any())  # nothing predicts the first token

    def __len__(self) -> int:
        return len(self.files)

    @property
    def num_tokens(self) -> int:
        return self._num_tokens

    def locate(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        places, lengths = self.files.locate(numbers)
        lengths = np.minimum(lengths, self._most)
        lengths[np.isin(numbers, self._dropped)] = 0
        return places, lengths

    def tokens(self, place: int, start: int, stop: int) -> np.ndarray:
        return self.files.tokens(place, start, stop)

    def label_weights(self, place: int, start: int, stop: int) -> np.ndarray | None:
        return self.files.label_weights(place, start, stop)

    def fingerprint(self) -> dict[str, Any]:
        return self.files.fingerprint()

    def file_of(self, number: int) -> tuple[str, int]:
        """As of the files."""
        return self.files.file_of(number)

    def document(self, index: int) -> np.ndarray:
        """As of the files: the whole document."""
        return self.files.document(index)
