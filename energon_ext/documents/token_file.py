# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Megatron's tokenized files: a ``.bin`` of token ids, an ``.idx`` of where documents begin."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Mapping

import numpy as np
from megatron.energon.flavors.webdataset.config import MAIN_FOLDER_NAME

from energon_ext.errors import ConfigError

SUFFIXES = (".bin", ".idx")

#: Beside a pair that `energon-ext prepare` wrote: which tokenizer made it.
META_SUFFIX = ".meta.json"

#: Tokens that are looked at to find ids that the tokenizer does not have.
_CHECKED_TOKENS = 1 << 20


def is_token_file(path: Any) -> bool:
    """Whether a path without a suffix names a ``.bin`` and ``.idx`` pair, or one of the two.

    Example:
        >>> is_token_file("no/such/web_text_document")
        False
    """
    present = [os.path.isfile(f"{path}{suffix}") for suffix in SUFFIXES]
    if os.path.isdir(str(path)):
        # Megatron's GPTDataset keeps its cache in a folder of the pair's name.
        return all(present) and not os.path.exists(f"{path}/{MAIN_FOLDER_NAME}")
    # Energon puts an .idx beside a JSONL file, which is there without a suffix as well.
    return not os.path.exists(str(path)) and any(present)


class TokenFile:
    """The documents of one ``.bin``/``.idx`` pair, by index, on a memory map.

    The index is read with megatron-core's ``IndexedDataset``. Nothing is copied: neither tokens nor
    the places of documents, so a file of 10^9 documents opens as fast as one of ten.

    Args:
        prefix: path without suffix, as Megatron's ``--data-path`` takes it.

    Attributes:
        tokens: [tokens in the file] of the file's integer type, a view of the memory map.

    Raises:
        ConfigError: one of the two files is missing, damaged or not of the other; or megatron-core
            is not installed.
    """

    def __init__(self, prefix: str | Path):
        self.prefix = str(prefix)
        for suffix in SUFFIXES:
            if not os.path.isfile(self.prefix + suffix):
                raise ConfigError(f"{self.prefix}{suffix}: does not exist; a pair is needed.")
        self._open()

    def _open(self) -> None:
        # It unmaps its memory when it goes.
        index = self._index = self._read_index()
        self._pointers = index.sequence_pointers
        self._first_sequences = index.document_indices
        self._token_bytes = np.dtype(index.dtype).itemsize
        num_bytes = os.path.getsize(self.prefix + ".bin")
        expected = int(index.sequence_lengths.sum(dtype=np.int64)) * self._token_bytes
        if num_bytes != expected:
            raise ConfigError(
                f"{self.prefix}.bin has {num_bytes} bytes, its .idx speaks of {expected}: one of "
                f"them is of another run or incomplete; write the pair again."
            )
        self._end = num_bytes
        # A plain array over the memory map: slices of numpy's own memmap class are slow.
        empty = np.zeros(0, index.dtype)
        self.tokens = (
            np.asarray(np.memmap(self.prefix + ".bin", index.dtype, "r")) if num_bytes else empty
        )

    def _read_index(self) -> Any:
        try:
            return _indexed_dataset_module().IndexedDataset(self.prefix, mmap=True).index
        except (AssertionError, ValueError, KeyError, OSError) as error:
            raise ConfigError(
                f"{self.prefix}.idx: not an index of Megatron ({error}); write the pair again."
            ) from error

    def __len__(self) -> int:
        """Number of documents."""
        return len(self._first_sequences) - 1

    @property
    def num_tokens(self) -> int:
        return self._end // self._token_bytes

    def ranges(self, documents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """First token of each document in :attr:`tokens`, and its length; both int64 [n]."""
        starts = self._bytes_before(self._first_sequences[documents])
        stops = self._bytes_before(self._first_sequences[documents + 1])
        return starts // self._token_bytes, (stops - starts) // self._token_bytes

    def document(self, index: int) -> np.ndarray:
        """Tokens of one document."""
        starts, lengths = self.ranges(np.array([index]))
        return self.tokens[int(starts[0]) : int(starts[0] + lengths[0])]

    def check_tokenizer(self, fingerprint: Mapping[str, Any], vocab_size: int) -> None:
        """Raise ConfigError where the tokens are not those of a tokenizer, as far as can be seen.

        Args:
            fingerprint: of the tokenizer; compared where the file says which one wrote it.
            vocab_size: ids are below it; the first million is looked at.
        """
        meta = Path(self.prefix + META_SUFFIX)
        if meta.is_file():
            try:
                written = json.loads(meta.read_text(encoding="utf-8"))["tokenizer"]
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError(f"{meta}: not what `energon-ext prepare` writes.") from error
            if written != dict(fingerprint):
                raise ConfigError(
                    f"{self.prefix}: written with the tokenizer {written}, to be read with "
                    f"{dict(fingerprint)}; use the one it was written with."
                )
        highest = int(self.tokens[:_CHECKED_TOKENS].max(initial=0))
        if highest >= vocab_size:
            raise ConfigError(
                f"{self.prefix}: holds the token id {highest}, the tokenizer has {vocab_size}; use "
                f"the one the file was written with."
            )

    def _bytes_before(self, sequences: np.ndarray) -> np.ndarray:
        inside = sequences < len(self._pointers)
        if inside.all():
            return self._pointers[sequences]
        return np.where(inside, self._pointers[np.where(inside, sequences, 0)], self._end)

    def __getstate__(self) -> str:
        return self.prefix

    def __setstate__(self, prefix: str) -> None:
        self.__init__(prefix)


def token_file_builder(prefix: str | Path, vocab_size: int) -> Any:
    """Megatron-core's builder of a pair: ``add_document``, then ``finalize`` with the ``.idx``."""
    module = _indexed_dataset_module()
    dtype = module.DType.optimal_dtype(vocab_size)
    return module.IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)


def _indexed_dataset_module() -> Any:
    try:
        from megatron.core.datasets import indexed_dataset
    except ImportError as error:
        raise ConfigError(
            "Token files are read and written with megatron-core: "
            "pip install 'energon_ext[megatron]'."
        ) from error
    return indexed_dataset
