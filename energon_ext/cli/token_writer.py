# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Writes documents of one split as a Megatron ``.bin``/``.idx`` pair."""

import json
import warnings
from pathlib import Path

import torch

from energon_ext.cli.counts import SplitCounts
from energon_ext.documents.token_file import META_SUFFIX, token_file_builder
from energon_ext.encoders.tokenizers import Tokenizer

#: Texts that are tokenized together; the tokenizers library spreads them over all cores.
BATCH_TEXTS = 1000


class TokenSplitWriter:
    """Tokenizes documents in batches and hands them to megatron-core's builder.

    Args:
        folder: where ``SPLIT.bin``, ``SPLIT.idx`` and ``SPLIT.meta.json``, which names the
            tokenizer, are written.
        split: name of the split.
        tokenizer: its special tokens are written with every document.
    """

    def __init__(self, folder: Path, split: str, tokenizer: Tokenizer):
        self.counts = SplitCounts()
        self._prefix = folder / split
        self._tokenizer = tokenizer
        self._texts: list[str] = []
        self._builder = None

    def write(self, key: str, text: bytes) -> None:
        self._texts.append(text.decode("utf-8"))
        self.counts.documents += 1
        if len(self._texts) == BATCH_TEXTS:
            self._write_batch()

    def close(self) -> None:
        self._write_batch()
        if self._builder is not None:
            self._builder.finalize(f"{self._prefix}.idx")
            meta = {
                "tokenizer": self._tokenizer.fingerprint(),
                "vocab_size": self._tokenizer.vocab_size,
            }
            Path(f"{self._prefix}{META_SUFFIX}").write_text(json.dumps(meta, indent=2) + "\n")
            self._builder = None

    def _write_batch(self) -> None:
        texts, self._texts = self._texts, []
        if texts and self._builder is None:
            self._builder = token_file_builder(self._prefix, self._tokenizer.vocab_size)
            self.counts.shards = 1
        for tokens in self._tokenizer.encode_batch(texts) if texts else ():
            self.counts.tokens += len(tokens)
            with warnings.catch_warnings():  # megatron-core 0.16 calls NumPy 2 the old way
                warnings.simplefilter("ignore", DeprecationWarning)
                self._builder.add_document(torch.from_numpy(tokens), [len(tokens)])
