# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""How documents become tokens: texts all alike, conversations with weights."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from energon_ext.cli.documents import Document, LeftOut
from energon_ext.encoders.sft import SFTTaskEncoder
from energon_ext.encoders.tokenizers import Tokenizer
from energon_ext.errors import ConfigError, SampleError

#: As many refused conversations in a row end a preparation, as they end a run of Energon.
MOST_REFUSED_IN_A_ROW = 100

#: A document, its token ids, and the weights of its labels, None for 1 everywhere.
Encoded = tuple[Document, np.ndarray, np.ndarray | None]


class Encoding:
    """Texts by a tokenizer, or conversations by an encoder; what is left out is counted.

    With ``over_long="error"`` of the encoder every conversation that it refuses is an error.
    """

    def __init__(self, tokenizer: Tokenizer, encoder: SFTTaskEncoder | None = None):
        self.tokenizer = tokenizer
        self.refused = LeftOut()
        self._encoder = encoder
        self._refused_in_a_row = 0

    def encode(self, documents: Sequence[Document]) -> Iterator[Encoded]:
        """The documents that can be trained on, in order."""
        if self._encoder is None:
            texts = [document.text for document in documents]
            for document, tokens in zip(documents, self.tokenizer.encode_batch(texts)):
                yield document, tokens, None
            return
        for document in documents:
            try:
                encoded = self._encoder.encode_document(document.conversation)
            except SampleError as error:
                self._refuse(error, self._encoder.over_long)
                continue
            self._refused_in_a_row = 0
            yield document, encoded.tokens, encoded.label_weights

    def description(self) -> dict[str, Any]:
        """What the meta file says of it."""
        encoder = self._encoder
        texts = {"tokenizer": self.tokenizer.fingerprint(), "vocab_size": self.tokenizer.vocab_size}
        if encoder is None:
            return texts
        return {
            **texts,
            "chat_template": encoder.chat_template.fingerprint(),
            "seq_len": encoder.seq_len,
            "over_long": encoder.over_long,
            "label_weights": {"dtype": "uint8"},
        }

    def _refuse(self, error: SampleError, over_long: str) -> None:
        self.refused.add(error)
        self._refused_in_a_row += 1
        if over_long == "error":
            raise ConfigError(f"{error} With --over-long cut it is cut or left out.") from error
        if self._refused_in_a_row == MOST_REFUSED_IN_A_ROW:
            raise ConfigError(
                f"{MOST_REFUSED_IN_A_ROW} conversations in a row cannot be trained on, the last: "
                f"{error}"
            ) from error
