# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The tokenizer protocol: what the data pipeline needs to turn text into token ids.

A resume detects by its fingerprint that a tokenizer was replaced.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from energon_ext.arguments import check_integer
from energon_ext.errors import ConfigError
from energon_ext.tokens.documents import Documents


class Tokenizer(ABC):
    """Base class of all tokenizers.

    Attributes:
        vocab_size: ids are in ``[0, vocab_size)``.
        bos_id, eos_id: None if the tokenizer has none.
        pad_id: fills unused positions; never trained on, so it may be any id.
        add_bos, add_eos: whether :meth:`encode` adds them to the text; no ``eos`` to one that has
            it at its end.
        name: argument of :func:`energon_ext.load_tokenizer` that loads it, or None.
    """

    vocab_size: int
    bos_id: int | None
    eos_id: int | None
    pad_id: int
    add_bos: bool
    add_eos: bool
    name: str | None = None

    @abstractmethod
    def encode_array(self, text: str) -> np.ndarray:
        """Return the token ids of ``text``, including special tokens, as int64 [n]."""

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the token ids of many texts, computed on all cores if the library can."""
        return [self.encode_array(text) for text in texts]

    def encode_bare(self, texts: Sequence[str], *, continued: bool = False) -> list[np.ndarray]:
        """Return the token ids of texts without the special tokens around them.

        Args:
            continued: each text follows other text; a tokenizer that puts a space before a text
                (SentencePiece, Metaspace) puts none here.
        """
        encoded = self.encode_batch(texts)
        return [ids[int(self.add_bos) : len(ids) - int(self.add_eos)] for ids in encoded]

    def added_tokens(self) -> Mapping[str, int]:
        """Return the ids of the texts that are cut out of a text before anything else.

        What is between them is tokenized independently. Not all need to be here.
        """
        return {}

    def encode(self, text: str) -> list[int]:
        """Return the token ids of ``text``, including special tokens."""
        return self.encode_array(text).tolist()

    @abstractmethod
    def decode(self, tokens: Any) -> str:
        """Return the text of token ids, without special tokens."""

    def show(self, tokens: Any) -> str:
        """Return the text of token ids for people, with its special tokens."""
        return self.decode(tokens)

    @abstractmethod
    def fingerprint(self) -> dict[str, Any]:
        """Return JSON values that change whenever the ids of any text change."""

    def padded_vocab_size(self, multiple: int = 128) -> int:
        """Return the vocabulary size rounded up, as tensor-parallel embeddings need it.

        Example:
            >>> from energon_ext.tokenizers.tokenizers import ByteTokenizer
            >>> ByteTokenizer().padded_vocab_size(64)
            320
        """
        check_integer("vocabulary multiple", multiple, 1)
        return -(-self.vocab_size // multiple) * multiple

    def _surround(self, ids: np.ndarray) -> np.ndarray:
        prefix = np.array([self.bos_id] if self.add_bos else [], np.int64)
        suffix = np.array([self.eos_id] if self.add_eos else [], np.int64)
        return np.concatenate([prefix, ids, suffix], dtype=np.int64, casting="unsafe")


#: Attributes that a tokenizer has, beside its name.
TOKENIZER_ATTRIBUTES = tuple(name for name in Tokenizer.__annotations__ if name != "name")


def check_tokenizer(tokenizer: Any) -> None:
    """Raise ConfigError unless a user's tokenizer has all members of the protocol."""
    methods = ("encode_array", "encode_batch", "encode_bare", "added_tokens", "decode", "show")
    required = (*TOKENIZER_ATTRIBUTES, *methods, "fingerprint")
    missing = [name for name in required if not hasattr(tokenizer, name)]
    if missing:
        raise ConfigError(
            f"tokenizer: a {type(tokenizer).__name__} has no {', '.join(missing)}; make it a "
            f"subclass of energon_ext.tokenizers.protocol.Tokenizer."
        )


class UnknownTokenizer(Tokenizer):
    """Stands for the tokenizer of token files that are only planned: a plan reads no token."""

    vocab_size, pad_id = 2**24, 0  # more ids than any tokenizer has
    bos_id = eos_id = None
    add_bos = add_eos = False

    def encode_array(self, text: str) -> np.ndarray:
        raise ConfigError("Text needs the tokenizer of the run; give --tokenizer.")

    def decode(self, tokens: Any) -> str:
        raise ConfigError("Text needs the tokenizer of the run; give --tokenizer.")

    def fingerprint(self) -> dict[str, Any]:
        return {}


def check_written(files: Documents, tokenizer: Tokenizer) -> None:
    """Raise ConfigError if token files were not written with a tokenizer, if it is known."""
    if isinstance(tokenizer, UnknownTokenizer):
        return
    name = tokenizer.name or type(tokenizer).__name__
    files.check_tokenizer(name, tokenizer.fingerprint(), tokenizer.vocab_size)
