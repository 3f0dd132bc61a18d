# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Writes a ``.bin``/``.idx`` pair, document by document, with its weights and origins."""

import json
import os
from array import array
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import numpy as np

from energon_ext.batch.columns import NO_COLUMNS, Column
from energon_ext.errors import ConfigError
from energon_ext.tokens.column_files import ColumnWriter
from energon_ext.tokens.index import META_SUFFIX, WEIGHTS_SUFFIX, write_index
from energon_ext.tokens.origins import ORIGINS_SUFFIX, line_of

#: Vocabularies below this size are written as uint16, as in megatron-core.
_UINT16_VOCAB_SIZE = 65_500


def token_type(vocab_size: int) -> np.dtype:
    """Return the type of the token ids of a vocabulary in a file."""
    return np.dtype(np.uint16 if vocab_size < _UINT16_VOCAB_SIZE else np.int32)


def weights_type(weights: np.ndarray) -> np.dtype:
    """Return the smallest type for label weights: uint8 if all are 0 or 1, else float32."""
    return np.dtype(np.uint8 if np.isin(weights, (0, 1)).all() else np.float32)


def check_ids(tokens: np.ndarray, vocab_size: int, origin: str) -> None:
    """Raise ConfigError if a token id of a document is out of range."""
    for found in (int(tokens.min(initial=0)), int(tokens.max(initial=0))):
        if not 0 <= found < vocab_size:
            raise ConfigError(
                f"{origin}: token id {found}, but the tokenizer has {vocab_size} ids."
            )


class TokenWriter:
    """Writes one pair; it keeps four bytes per document in memory, and 28 while closing.

    Args:
        prefix: path without suffix.
        vocab_size: exclusive limit of the ids; it determines the token type.
        columns: further columns of the documents.

    The file of weights is written if a document has weights: as uint8 while all are 0 or 1, and as
    float32 from the first other weight on.
    """

    def __init__(
        self,
        prefix: str | Path,
        vocab_size: int,
        columns: Mapping[str, Column] = NO_COLUMNS,
    ):
        self.prefix = str(prefix)
        self.dtype = token_type(vocab_size)
        self.num_tokens = 0
        self._vocab_size = vocab_size
        self._weights_dtype: np.dtype[Any] = np.dtype(np.uint8)
        self._lengths = array("i")
        self._files = ExitStack()
        self._tokens = self._open(".bin")
        self._origins = self._open(ORIGINS_SUFFIX)
        self._weights: IO[bytes] | None = None
        self._columns = {
            name: ColumnWriter(self.prefix, name, column) for name, column in columns.items()
        }
        for writer in self._columns.values():
            self._files.callback(writer.abandon)

    def write(
        self,
        tokens: np.ndarray,
        weights: np.ndarray | None = None,
        columns: Mapping[str, Any] = NO_COLUMNS,
        *,
        origin: str = "",
    ) -> None:
        """Append a document; ConfigError if a token id is out of range.

        Args:
            columns: values of the document by column; those it lacks are filled.
        """
        check_ids(tokens, self._vocab_size, origin)
        for name, writer in self._columns.items():
            writer.write(columns.get(name), len(tokens), origin)
        if weights is not None and self._weights is None:
            self._weights = self._open(WEIGHTS_SUFFIX)
            self._write_ones(self.num_tokens)
        if self._weights is not None and weights is None:
            self._write_ones(len(tokens))
        elif self._weights is not None:
            weights = np.asarray(weights)
            if self._weights_dtype == np.uint8 and weights_type(weights) != np.uint8:
                self._widen_weights()
            self._weights.write(weights.astype(self._weights_dtype).tobytes())
        self._tokens.write(tokens.astype(self.dtype).tobytes())
        self._origins.write(line_of(origin).encode("utf-8", "replace"))
        self._lengths.append(len(tokens))
        self.num_tokens += len(tokens)

    @property
    def num_documents(self) -> int:
        return len(self._lengths)

    def close(self, meta: Mapping[str, Any] | None = None) -> None:
        """Finish the pair; ``meta`` is the content of its ``.meta.json``, None to write none."""
        for writer in self._columns.values():
            writer.close()
        self.abandon()
        write_index(self.prefix + ".idx", self.dtype, np.frombuffer(self._lengths, np.intc))
        if meta is None:
            return
        if self._weights is not None:
            meta = {**meta, "label_weights": {"dtype": self._weights_dtype.name}}
        text = json.dumps(meta, indent=2) + "\n"
        Path(self.prefix + META_SUFFIX).write_text(text, encoding="utf-8")

    def abandon(self) -> None:
        """Close the files without finishing the pair."""
        self._files.close()

    def _open(self, suffix: str) -> IO[bytes]:
        return self._files.enter_context(open(self.prefix + suffix, "wb"))

    def _widen_weights(self) -> None:
        """Write the weights so far again, as float32."""
        assert self._weights is not None
        self._weights.flush()
        narrow = Path(self.prefix + WEIGHTS_SUFFIX + ".uint8")
        os.replace(self.prefix + WEIGHTS_SUFFIX, narrow)
        self._weights_dtype = np.dtype(np.float32)
        self._weights = self._open(WEIGHTS_SUFFIX)
        with narrow.open("rb") as written:
            while block := written.read(1 << 20):
                self._weights.write(np.frombuffer(block, np.uint8).astype(np.float32).tobytes())
        narrow.unlink()

    def _write_ones(self, count: int) -> None:
        assert self._weights is not None
        for begin in range(0, count, 1 << 20):
            part = min(1 << 20, count - begin)
            self._weights.write(np.ones(part, self._weights_dtype).tobytes())
