# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The documents of a token file one by one, for splicing; the file stays on disk."""

from __future__ import annotations

import hashlib

import numpy as np

from energon_ext.token_source import TokenFileFactory


class TokenFileDocuments:
    """A :class:`~energon_ext.splice_source.DocumentStore` over a ``.bin``/``.idx`` pair.

    Lengths come from the index, tokens are views of the memory map: nothing is read before it is
    shown, however many documents are chosen.

    Args:
        factory: the token file as the metadataset names it; numbers count from its subset on.

    Attributes:
        lengths: int64 [documents].
        keys: None, its documents have no keys.
    """

    keys = None

    def __init__(self, factory: TokenFileFactory):
        self._file = factory.file
        self._first, stop = factory.document_range
        self.lengths = self._file.ranges(np.arange(self._first, stop))[1]

    def tokens(self, number: int) -> np.ndarray:
        return self._file.document(self._first + number)

    def digest(self, numbers: np.ndarray) -> str:
        """Names the chosen documents without reading them: by number, length and size of file."""
        chosen = np.stack([np.asarray(numbers, np.int64) + self._first, self.lengths[numbers]])
        digest = hashlib.sha256(self._file.num_tokens.to_bytes(8, "little"))
        digest.update(chosen.tobytes())
        return digest.hexdigest()
