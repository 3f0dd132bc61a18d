# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Text to token ids.

A tokenizer here is what the data pipeline needs of one, with a fingerprint by which a resume
notices that it was exchanged.
"""

import hashlib
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, Sequence

import numpy as np

from energon_ext.arguments import check_integer
from energon_ext.documents.file_set import TokenFiles
from energon_ext.encoders.tokenizer_files import (
    errors_of_library,
    load_tokenizer_file,
    load_with_transformers,
    special_tokens_beside,
)
from energon_ext.errors import ConfigError, log_of

logger = log_of(__name__)

#: Names of the token that ends a text, as well-known tokenizers have them.
END_OF_TEXT = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "[EOS]",
    "<｜end▁of▁sentence｜>",
)


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
            f"energon_ext.encoders.tokenizers.Tokenizer says what a tokenizer has."
        )


def check_written(files: TokenFiles, tokenizer: Tokenizer) -> None:
    """Raise ConfigError where token files hold what is no token of a tokenizer."""
    name = getattr(tokenizer, "name", type(tokenizer).__name__)
    files.check_tokenizer(name, tokenizer.fingerprint(), tokenizer.vocab_size)


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes, each byte + 4; ids 0..3 are pad, bos, eos and one in reserve.

    Example:
        >>> ByteTokenizer().encode("hi")
        [1, 108, 109, 2]
    """

    OFFSET = 4
    name = "bytes"

    def __init__(self, add_bos: bool = True, add_eos: bool = True):
        self.vocab_size = 256 + self.OFFSET
        self.pad_id, self.bos_id, self.eos_id = 0, 1, 2
        self.add_bos = add_bos
        self.add_eos = add_eos

    def encode_array(self, text: str) -> np.ndarray:
        # A lone surrogate has no UTF-8 form; one odd character must not lose a document.
        data = text.encode("utf-8", errors="replace")
        return self._surround(np.frombuffer(data, dtype=np.uint8).astype(np.int64) + self.OFFSET)

    def decode(self, tokens: Any) -> str:
        ids = np.asarray(tokens, dtype=np.int64)
        data = (ids[ids >= self.OFFSET] - self.OFFSET).astype(np.uint8).tobytes()
        return data.decode("utf-8", errors="replace")

    def fingerprint(self) -> dict[str, Any]:
        return {"kind": "bytes", "add_bos": self.add_bos, "add_eos": self.add_eos}


class HFTokenizer(Tokenizer):
    """A tokenizer of the Hugging Face libraries.

    Args:
        name_or_path: a ``tokenizer.json`` file (library ``tokenizers``), or a folder or model name
            (library ``transformers``).
        add_bos, add_eos: put the special tokens around every text.
        bos_token, eos_token, pad_token: names of the special tokens, where the file does not say or
            says something else.

    Raises:
        ConfigError: the library is missing, the file is no tokenizer, or a special token that is
            asked for is not in the vocabulary.
    """

    def __init__(
        self,
        name_or_path: str | Path,
        *,
        add_bos: bool = False,
        add_eos: bool = True,
        bos_token: str | None = None,
        eos_token: str | None = None,
        pad_token: str | None = None,
    ):
        self.name = str(name_or_path)
        self.add_bos = add_bos
        self.add_eos = add_eos
        self._tokenizer, defaults = _load_hf(self.name, finds_eos=add_eos and eos_token is None)
        # A file may hold those of the last call before it was saved; documents are never cut here.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        ids = self._tokenizer.get_vocab(with_added_tokens=True).values()
        self.vocab_size = max(ids, default=-1) + 1  # not their number: some leave ids out
        self.bos_id = self._special_id("bos", bos_token or defaults.get("bos"), needed=add_bos)
        self.eos_id = self._special_id("eos", eos_token or defaults.get("eos"), needed=add_eos)
        pad_id = self._special_id("pad", pad_token or defaults.get("pad"), needed=False)
        self.pad_id = 0 if pad_id is None else pad_id

    def encode_array(self, text: str) -> np.ndarray:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        # Leaves out the offsets of tokens in the text, which take a fifth of the time.
        with errors_of_library(f"Tokenizer {self.name}: cannot encode a text"):
            encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [self._surround(np.asarray(e.ids, dtype=np.int64)) for e in encodings]

    def decode(self, tokens: Any) -> str:
        return self._tokenizer.decode([int(token) for token in tokens], skip_special_tokens=True)

    def fingerprint(self) -> dict[str, Any]:
        content = hashlib.sha256(self._tokenizer.to_str().encode("utf-8")).hexdigest()
        return {
            "kind": "hf",
            "sha256": content,
            "add_bos": self.add_bos,
            "add_eos": self.add_eos,
            "bos_id": self.bos_id,
            "eos_id": self.eos_id,
        }

    def _special_id(self, role: str, token: str | None, *, needed: bool) -> int | None:
        found = self._tokenizer.token_to_id(token) if isinstance(token, str) else None
        if found is None and (needed or token is not None):
            raise ConfigError(
                f"Tokenizer {self.name}: no {role} token"
                + (f" {token!r} in its vocabulary" if token else " is named in it")
                + f"; name it with --{role}-token, in Python {role}_token=... or add_{role}=False."
            )
        return found


def load_tokenizer(
    name_or_path: str | Path,
    *,
    eos_token: str | None = None,
    bos_token: str | None = None,
    **options: Any,
) -> Tokenizer:
    """The tokenizer a command line names.

    Args:
        name_or_path: ``bytes``, a ``tokenizer.json`` file, a folder, or a Hugging Face name.
        eos_token: ends every text; by default what the tokenizer says of itself, and of a bare
            ``tokenizer.json`` what is beside it or the first of :data:`END_OF_TEXT` that it has.
        bos_token: begins every text, where it is given.
        **options: passed on to :class:`ByteTokenizer` or :class:`HFTokenizer`.

    Example:
        >>> load_tokenizer("bytes").vocab_size
        260
    """
    if str(name_or_path) == "bytes":
        if eos_token is not None or bos_token is not None:
            raise ConfigError(
                f"Tokenizer bytes: has its own tokens at both ends; leave "
                f"{bos_token or eos_token!r} out."
            )
        return ByteTokenizer(**options)
    if bos_token is not None:
        options.setdefault("add_bos", True)
    return HFTokenizer(name_or_path, eos_token=eos_token, bos_token=bos_token, **options)


def _load_hf(name: str, finds_eos: bool) -> tuple[Any, dict[str, str | None]]:
    """A ``tokenizers.Tokenizer`` and the names of its special tokens."""
    if Path(name).is_file():
        tokenizer = load_tokenizer_file(name)
        beside = special_tokens_beside(Path(name))
        return tokenizer, _well_known(tokenizer, name) if finds_eos and not beside else beside
    if name.endswith(".json"):  # no model is called so; do not ask a hub for it
        raise ConfigError(f"Tokenizer file {name!r} does not exist; check the path.")
    loaded = load_with_transformers(name, f"Tokenizer {name!r}, not `bytes` and not a file")
    defaults = {"bos": loaded.bos_token, "eos": loaded.eos_token, "pad": loaded.pad_token}
    return loaded.backend_tokenizer, defaults


def _well_known(tokenizer: Any, name: str) -> dict[str, str | None]:
    """The end of a text by its usual names, as a bare file does not say what its tokens are for."""
    found = next((t for t in END_OF_TEXT if tokenizer.token_to_id(t) is not None), None)
    if found is not None:
        logger.warning("%s: %s ends every text; --eos-token names another.", name, found)
    return {"eos": found}
