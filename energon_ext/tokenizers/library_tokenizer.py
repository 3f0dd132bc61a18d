# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Base of tokenizers of other libraries: options, special tokens and fingerprint."""

from abc import abstractmethod
from pathlib import Path
from types import MappingProxyType
from typing import Any, Mapping, Sequence

import numpy as np

from energon_ext.errors import ConfigError
from energon_ext.tokenizers.files import errors_of_library
from energon_ext.tokenizers.protocol import Tokenizer

#: In place of the name of a bos token: texts have none.
NO_TOKEN = "none"


class LibraryTokenizer(Tokenizer):
    """Base of tokenizers of other libraries: options, special tokens and fingerprint."""

    name: str
    _kind: str
    _sha256: str
    #: Names of the special tokens, as given by the tokenizer's files.
    _defaults: Mapping[str, str | None] = MappingProxyType({})

    def __init__(
        self,
        name_or_path: str | Path,
        *,
        add_bos: bool | None = None,
        add_eos: bool = True,
        bos_token: str | None = None,
        eos_token: str | None = None,
        pad_token: str | None = None,
    ):
        self.name = str(name_or_path)
        self.add_eos = add_eos
        self._load(guess_eos=add_eos and eos_token is None)
        if bos_token == NO_TOKEN:
            add_bos, bos_token = bool(add_bos), None
        own = self._own_bos()
        begins = bos_token or own  # a token that is named begins every text
        self.add_bos = begins is not None if add_bos is None else add_bos
        self.bos_id = self._special_id("bos", begins, needed=self.add_bos)
        self.eos_id = self._special_id("eos", eos_token, needed=add_eos)
        self.pad_id = self._special_id("pad", pad_token, needed=False) or 0

    @abstractmethod
    def _load(self, guess_eos: bool) -> None:
        """Set the library's tokenizer, its hash and the vocabulary size."""

    def _own_bos(self) -> str | None:
        """Return the bos token that the library puts in front of a text by itself."""
        return None

    @abstractmethod
    def _id_of(self, role: str, token: str | None) -> int | None:
        """Return the id of a special token, by name if one is given; None if there is none."""

    @abstractmethod
    def _encode(self, texts: list[str], continued: bool) -> list[list[int]]:
        """Return the ids of texts, without special tokens."""

    def encode_array(self, text: str) -> np.ndarray:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        # A text that ends with the end-of-text token gets no second one.
        encoded = (self._surround(ids) for ids in self._encode_plain(texts))
        return [ids[:-1] if self._ends_twice(ids) else ids for ids in encoded]

    def _ends_twice(self, ids: np.ndarray) -> bool:
        last = ids[int(self.add_bos) :][-2:]
        return self.add_eos and len(last) == 2 and bool((last == self.eos_id).all())

    def encode_bare(self, texts: Sequence[str], *, continued: bool = False) -> list[np.ndarray]:
        return self._encode_plain(texts, continued)

    def _encode_plain(self, texts: Sequence[str], continued: bool = False) -> list[np.ndarray]:
        with errors_of_library(f"Tokenizer {self.name}: cannot encode a text"):
            encoded = self._encode(list(texts), continued)
        return [np.asarray(ids, dtype=np.int64) for ids in encoded]

    def fingerprint(self) -> dict[str, Any]:
        fields = ("add_bos", "add_eos", "bos_id", "eos_id")
        options = {name: getattr(self, name) for name in fields}
        return {"kind": self._kind, "sha256": self._sha256, **options}

    def _special_id(self, role: str, token: str | None, *, needed: bool) -> int | None:
        token = token or self._defaults.get(role)
        token_id = self._id_of(role, token)
        if token_id is None and (needed or token is not None):
            token_text = f"{token!r} in its vocabulary" if token else "in its files"
            raise ConfigError(
                f"Tokenizer {self.name}: no {role} token {token_text}; name one with "
                f"--{role}-token, or in Python with {role}_token=... or add_{role}=False."
            )
        return token_id
