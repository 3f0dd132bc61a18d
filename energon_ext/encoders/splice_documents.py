# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Documents one by one, for splicing."""

import hashlib
import json
from typing import Protocol, Sequence

import numpy as np

from energon_ext.documents.file_set import TokenFiles
from energon_ext.documents.origins import origins_of


class DocumentStore(Protocol):
    """Documents by number, with lengths that cost nothing.

    Attributes:
        lengths: int64 [documents], tokens of each.
        keys: of the samples, or None where documents have none.
    """

    lengths: np.ndarray
    keys: Sequence[str] | None

    def tokens(self, number: int) -> np.ndarray:
        """Token ids of a document; a view of a memory map where there is one."""


class TokenFileDocuments:
    """Some documents of token files, numbered from the first of them on.

    Lengths come from the index, tokens are views of the memory map: nothing is read before it is
    shown, however many documents are chosen.

    Args:
        has_keys: take the origins of the documents as their keys.
    """

    keys: Sequence[str] | None = None

    def __init__(self, files: TokenFiles, first: int, stop: int, has_keys: bool):
        self._files, self._first = files, first
        if has_keys:
            found = [origins_of(prefix) for prefix in files.prefixes]
            keys = [each[n] for each in found if each is not None for n in range(len(each))]
            self.keys = keys[first:stop]
        self._places, self.lengths = self._files.locate(np.arange(self._first, stop))

    def tokens(self, number: int) -> np.ndarray:
        return self._files.tokens(int(self._places[number]), 0, int(self.lengths[number]))

    def digest(self, numbers: np.ndarray) -> str:
        """Names the chosen documents: by number, length, and the fingerprint of their files."""
        chosen = np.stack([np.asarray(numbers, np.int64) + self._first, self.lengths[numbers]])
        digest = hashlib.sha256(json.dumps(self._files.fingerprint()).encode())
        digest.update(chosen.tobytes())
        return digest.hexdigest()
