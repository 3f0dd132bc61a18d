# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Documents one by one, for splicing: of an Energon dataset, and of a token file."""

import hashlib
import json
from typing import Any, Iterator, Protocol, Sequence

import numpy as np
from megatron.energon.flavors.base_dataset import SavableDataset
from tqdm import tqdm

from energon_ext.config.references import TokenFileFactory
from energon_ext.documents.text import Document


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


class EnergonDocuments:
    """The documents of an Energon dataset of one worker, numbered in the order of its files.

    Text must be tokenized once to know its lengths. Only lengths and keys of that pass are kept;
    the chosen documents are read again.
    """

    def __init__(self, documents: SavableDataset[Document]):
        self._documents = documents
        found = list(self._each())
        # Energon reads shards in an order of its own; the last part of a restore key is the number
        # of the sample in its split.
        found.sort(key=lambda entry: entry[0][-1])
        self._restore_keys = [restore_key for restore_key, _, _ in found]
        self.keys: Sequence[str] | None = [key for _, key, _ in found]
        self.lengths = np.array([length for _, _, length in found], np.int64)

    def tokens(self, number: int) -> np.ndarray:
        worker_config = self._documents.worker_config
        worker_config.worker_activate(number)
        try:
            return self._documents.restore_sample(self._restore_keys[number]).tokens
        finally:
            worker_config.worker_deactivate()

    def _each(self) -> Iterator[tuple[tuple[Any, ...], str, int]]:
        worker_config = self._documents.worker_config
        worker_config.worker_activate(0)
        try:
            total = self._documents.len_worker(0)
            for document in tqdm(self._documents, "lengths", total, unit="doc", delay=5):
                yield document.__restore_key__, document.__key__, len(document.tokens)
        finally:
            worker_config.worker_deactivate()


class TokenFileDocuments:
    """The documents of a token file as the metadataset names it; numbers count from its subset on.

    Lengths come from the index, tokens are views of the memory map: nothing is read before it is
    shown, however many documents are chosen.
    """

    keys: Sequence[str] | None = None

    def __init__(self, factory: TokenFileFactory):
        self._files = factory.files
        self._first, stop = factory.document_range
        self._places, self.lengths = self._files.locate(np.arange(self._first, stop))

    def tokens(self, number: int) -> np.ndarray:
        return self._files.tokens(int(self._places[number]), 0, int(self.lengths[number]))

    def digest(self, numbers: np.ndarray) -> str:
        """Names the chosen documents: by number, length, and the fingerprint of their files."""
        chosen = np.stack([np.asarray(numbers, np.int64) + self._first, self.lengths[numbers]])
        digest = hashlib.sha256(json.dumps(self._files.fingerprint()).encode())
        digest.update(chosen.tobytes())
        return digest.hexdigest()
