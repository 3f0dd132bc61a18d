# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Writes a ``.bin``/``.idx`` pair, document by document, with its weights and origins."""

import json
from array import array
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import numpy as np

from energon_ext.batch.columns import LABEL_WEIGHTS, NO_COLUMNS, Column, foreign_id
from energon_ext.errors import ConfigError
from energon_ext.tokens.column_files import ColumnWriter
from energon_ext.tokens.index import META_SUFFIX, WEIGHTS_SUFFIX, write_index
from energon_ext.tokens.origins import ORIGINS_SUFFIX, line_of

#: Vocabularies below this size are written as uint16, as in megatron-core.
_UINT16_VOCAB_SIZE = 65_500

#: Weights that are written at once.
_CHUNK = 1 << 20


def token_type(vocab_size: int) -> np.dtype:
    """Return the type of the token ids of a vocabulary in a file."""
    return np.dtype(np.uint16 if vocab_size < _UINT16_VOCAB_SIZE else np.int32)


def weights_type(weights: np.ndarray) -> np.dtype:
    """Return the smallest type for label weights: uint8 if all are 0 or 1, else float32."""
    return np.dtype(np.uint8 if np.isin(weights, (0, 1)).all() else np.float32)


def check_ids(tokens: np.ndarray, vocab_size: int, origin: str) -> None:
    """Raise ConfigError if a token id of a document is out of range."""
    if (found := foreign_id(tokens, vocab_size)) is not None:
        raise ConfigError(f"{origin}: token id {found}, but the tokenizer has {vocab_size} ids.")


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
        self._lengths = array("i")
        self._files = ExitStack()
        self._tokens = self._open(".bin")
        self._origins = self._open(ORIGINS_SUFFIX)
        self._columns: dict[str, ColumnWriter] = {}
        for name, column in columns.items():
            self._add_column(name, column)

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
        if weights is not None:
            self._make_place_for(np.asarray(weights))
            columns = {**columns, LABEL_WEIGHTS: weights}
        for name, writer in self._columns.items():
            writer.write(columns.get(name), len(tokens), origin)
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
        if weights := self._columns.get(LABEL_WEIGHTS):
            meta = {**meta, LABEL_WEIGHTS: {"dtype": weights.column.dtype.name}}
        text = json.dumps(meta, indent=2) + "\n"
        Path(self.prefix + META_SUFFIX).write_text(text, encoding="utf-8")

    def abandon(self) -> None:
        """Close the files without finishing the pair."""
        self._files.close()

    def _open(self, suffix: str) -> IO[bytes]:
        return self._files.enter_context(open(self.prefix + suffix, "wb"))

    def _add_column(self, name: str, column: Column) -> None:
        self._columns[name] = ColumnWriter(self.prefix, name, column)
        self._files.callback(self._columns[name].abandon)

    def _make_place_for(self, weights: np.ndarray) -> None:
        """Begin a file of weights, of ones so far; or write it again in a type that holds these."""
        dtype, before = weights_type(weights), self._columns.get(LABEL_WEIGHTS)
        if before is None:
            self._add_column(LABEL_WEIGHTS, Column(dtype, fill=1))
            for begin in range(0, self.num_tokens, _CHUNK):
                count = min(_CHUNK, self.num_tokens - begin)
                self._columns[LABEL_WEIGHTS].write(None, count)
        elif before.column.dtype.itemsize < dtype.itemsize:
            before.close()
            narrow = Path(self.prefix + WEIGHTS_SUFFIX).rename(self.prefix + ".narrow")
            self._add_column(LABEL_WEIGHTS, Column(dtype, fill=1))
            with narrow.open("rb") as written:
                while block := written.read(_CHUNK):
                    values = np.frombuffer(block, before.column.dtype)
                    self._columns[LABEL_WEIGHTS].write(values, len(values))
            narrow.unlink()
