# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""A tokenizer without files: each byte is a token."""

import itertools
from typing import Any, Sequence

import numpy as np

from energon_ext.tokenizers.protocol import Tokenizer


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes, each as byte + 4; ids 0..3 are pad, bos, eos and reserved.

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
        return self._surround(self.encode_bare([text])[0])

    def decode(self, tokens: Any) -> str:
        ids = np.asarray(tokens, dtype=np.int64)
        data = (ids[ids >= self.OFFSET] - self.OFFSET).astype(np.uint8).tobytes()
        return data.decode("utf-8", errors="replace")

    def encode_bare(self, texts: Sequence[str], *, continued: bool = False) -> list[np.ndarray]:
        # A lone surrogate has no UTF-8 form; one odd character must not lose a document.
        contents = [text.encode("utf-8", errors="replace") for text in texts]
        return [np.frombuffer(each, np.uint8).astype(np.int64) + self.OFFSET for each in contents]

    def show(self, tokens: Any) -> str:
        special = {self.pad_id: "<pad>", self.bos_id: "<bos>", self.eos_id: "<eos>", 3: "<3>"}
        runs = itertools.groupby(map(int, tokens), key=special.get)
        return "".join(name * len([*ids]) if name else self.decode([*ids]) for name, ids in runs)

    def fingerprint(self) -> dict[str, Any]:
        return {"kind": "bytes", "add_bos": self.add_bos, "add_eos": self.add_eos}
