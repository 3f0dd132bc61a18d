# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Text to token ids.

A tokenizer here is what the data pipeline needs of one, with a fingerprint by which a resume
notices that it was exchanged.
"""

from abc import ABC, abstractmethod
from typing import Any, Sequence

import numpy as np

from energon_ext.arguments import check_integer
from energon_ext.documents.file_set import TokenFiles
from energon_ext.errors import ConfigError


class Tokenizer(ABC):
    """The protocol of a tokenizer.

    Attributes:
        vocab_size: ids are in ``[0, vocab_size)``.
        bos_id, eos_id: None when the tokenizer has none.
        pad_id: fills unused positions; never trained on, so it may be any id.
        add_bos, add_eos: whether :meth:`encode` puts them around the text.
    """

    vocab_size: int
    bos_id: int | None
    eos_id: int | None
    pad_id: int
    add_bos: bool
    add_eos: bool

    @abstractmethod
    def encode_array(self, text: str) -> np.ndarray:
        """Token ids of ``text``, special tokens included, int64 [n]."""

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Token ids of many texts; where the library can, on all cores."""
        return [self.encode_array(text) for text in texts]

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``, special tokens included."""
        return self.encode_array(text).tolist()

    @abstractmethod
    def decode(self, tokens: Any) -> str:
        """The text of token ids, special tokens left out."""

    @abstractmethod
    def fingerprint(self) -> dict[str, Any]:
        """JSON values that change whenever the ids of some text change."""

    def padded_vocab_size(self, multiple: int = 128) -> int:
        """The vocabulary rounded up, as tensor-parallel embeddings want it.

        Example:
            >>> from energon_ext.encoders.tokenizers import ByteTokenizer
            >>> ByteTokenizer().padded_vocab_size(64)
            320
        """
        check_integer("vocabulary multiple", multiple, 1)
        return -(-self.vocab_size // multiple) * multiple

    def _surround(self, ids: np.ndarray) -> np.ndarray:
        prefix = np.array([self.bos_id] if self.add_bos else [], np.int64)
        suffix = np.array([self.eos_id] if self.add_eos else [], np.int64)
        return np.concatenate([prefix, ids, suffix], dtype=np.int64, casting="unsafe")


#: By which a state describes a tokenizer.
TOKENIZER_ATTRIBUTES = tuple(Tokenizer.__annotations__)


def saved_tokenizer(tokenizer: Tokenizer) -> dict[str, Any]:
    """JSON values that stand for a tokenizer in a state."""
    return {
        "fingerprint": tokenizer.fingerprint(),
        "attributes": {name: getattr(tokenizer, name) for name in TOKENIZER_ATTRIBUTES},
    }


def check_tokenizer(tokenizer: Any) -> None:
    """Raise ConfigError where a tokenizer of a user lacks something of the protocol."""
    needed = (*TOKENIZER_ATTRIBUTES, "encode_array", "encode_batch", "decode", "fingerprint")
    lacking = [name for name in needed if not hasattr(tokenizer, name)]
    if lacking:
        raise ConfigError(
            f"tokenizer: a {type(tokenizer).__name__} has no {', '.join(lacking)}; "
            f"energon_ext.encoders.tokenizer_protocol.Tokenizer says what a tokenizer has."
        )


def check_written(files: TokenFiles, tokenizer: Tokenizer) -> None:
    """Raise ConfigError where token files hold what is no token of a tokenizer."""
    name = getattr(tokenizer, "name", type(tokenizer).__name__)
    files.check_tokenizer(name, tokenizer.fingerprint(), tokenizer.vocab_size)
