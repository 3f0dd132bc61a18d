# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Writes documents of one split as a Megatron ``.bin``/``.idx`` pair, with weights if they have."""

import json
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from energon_ext.cli.counts import Refusals, SplitCounts
from energon_ext.cli.documents import Document
from energon_ext.documents.label_weights import LabelWeightsWriter
from energon_ext.documents.token_file import META_SUFFIX, token_file_builder
from energon_ext.encoders.sft import SFTTaskEncoder
from energon_ext.encoders.tokenizers import Tokenizer
from energon_ext.errors import ConfigError, SampleError

#: Documents that are tokenized together; the tokenizers library spreads them over all cores.
BATCH_DOCUMENTS = 1000

#: As many refused conversations in a row end a preparation, as they end a run of Energon.
MOST_REFUSED_IN_A_ROW = 100

#: A document, its token ids, and the weights of its labels, None for 1 everywhere.
Encoded = tuple[Document, np.ndarray, np.ndarray | None]


class Encoding(Protocol):
    """How documents become tokens.

    Attributes:
        tokenizer: makes the ids.
        has_weights: whether documents have weights.
        refused: what was left out.
    """

    tokenizer: Tokenizer
    has_weights: bool
    refused: Refusals

    def encode(self, documents: Sequence[Document]) -> Iterator[Encoded]:
        """The documents that can be trained on, in order."""

    def description(self) -> dict[str, Any]:
        """What the meta file says of it beside the tokenizer."""


class TextEncoding:
    """Every document is a text."""

    has_weights = False

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.refused = Refusals()

    def encode(self, documents: Sequence[Document]) -> Iterator[Encoded]:
        texts = [document.text for document in documents]
        for document, tokens in zip(documents, self.tokenizer.encode_batch(texts)):
            yield document, tokens, None

    def description(self) -> dict[str, Any]:
        return {}


class ConversationEncoding:
    """Every document is a conversation; what the encoder cannot train on is left out.

    Args:
        encoder: weights the answers and cuts what is too long; with ``over_long="error"`` every
            conversation that it refuses is an error.
    """

    has_weights = True

    def __init__(self, encoder: SFTTaskEncoder):
        self.tokenizer = encoder.tokenizer
        self.refused = Refusals()
        self._encoder = encoder

    def encode(self, documents: Sequence[Document]) -> Iterator[Encoded]:
        for document in documents:
            try:
                encoded = self._encoder.encode_document(document.conversation)
            except SampleError as error:
                self._refuse(error)
                continue
            self.refused.in_a_row = 0
            yield document, encoded.tokens, encoded.label_weights

    def description(self) -> dict[str, Any]:
        encoder = self._encoder
        return {
            "chat_template": encoder.chat_template.fingerprint(),
            "seq_len": encoder.seq_len,
            "over_long": encoder.over_long,
        }

    def _refuse(self, error: SampleError) -> None:
        self.refused.add(str(error))
        if self._encoder.over_long == "error":
            raise ConfigError(f"{error} With --over-long cut it is cut or left out.") from error
        if self.refused.in_a_row == MOST_REFUSED_IN_A_ROW:
            raise ConfigError(
                f"{MOST_REFUSED_IN_A_ROW} conversations in a row cannot be trained on, the last: "
                f"{error}"
            ) from error


class TokenSplitWriter:
    """Encodes documents in batches and hands them to megatron-core's builder.

    Args:
        folder: where ``SPLIT.bin``, ``SPLIT.idx``, where there are weights ``SPLIT.weights.bin``,
            and ``SPLIT.meta.json``, which names the tokenizer, are written.
        split: name of the split.
        encoding: documents to tokens; both splits may share it.
    """

    def __init__(self, folder: Path, split: str, encoding: Encoding):
        self.counts = SplitCounts()
        self._prefix = folder / split
        self._encoding = encoding
        self._documents: list[Document] = []
        self._builder: Any = None
        self._weights: LabelWeightsWriter | None = None

    def write(self, key: str, document: Document) -> None:
        self._documents.append(document)
        if len(self._documents) == BATCH_DOCUMENTS:
            self._write_batch()

    def __enter__(self) -> "TokenSplitWriter":
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        if error_type is None:
            self._write_batch()
        if self._builder is not None:
            self._builder.finalize(f"{self._prefix}.idx")  # closes the files as well
            self._describe()

    def _describe(self) -> None:
        tokenizer = self._encoding.tokenizer
        meta = {
            "tokenizer": tokenizer.fingerprint(),
            "vocab_size": tokenizer.vocab_size,
            **self._encoding.description(),
        }
        if self._weights is not None:
            meta["label_weights"] = self._weights.close()
        Path(f"{self._prefix}{META_SUFFIX}").write_text(json.dumps(meta, indent=2) + "\n")

    def _write_batch(self) -> None:
        documents, self._documents = self._documents, []
        if not documents:
            return
        for document, tokens, weights in self._encoding.encode(documents):
            if self._builder is None:
                self._open()
            with warnings.catch_warnings():  # megatron-core 0.16 calls NumPy 2 the old way
                warnings.simplefilter("ignore", DeprecationWarning)
                self._builder.add_document(torch.from_numpy(tokens), [len(tokens)])
            if self._weights is not None:
                assert weights is not None
                self._weights.add(weights)
            self.counts.documents += 1
            self.counts.characters += len(document.text)
            self.counts.tokens += len(tokens)

    def _open(self) -> None:
        self._builder = token_file_builder(self._prefix, self._encoding.tokenizer.vocab_size)
        self.counts.shards = 1
        if self._encoding.has_weights:
            self._weights = LabelWeightsWriter(self._prefix)
