# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Shuffling of encoded documents and prompts, in memory that does not grow with their length."""

from __future__ import annotations

from typing import Any, Iterator

from megatron.energon import WorkerConfig
from megatron.energon.flavors.base_dataset import SavableDataset
from megatron.energon.wrappers.shuffle_buffer_dataset import ShuffleBufferDataset

from energon_ext.documents.text import Document
from energon_ext.packing.best_fit import most_tokens


class ShuffledDocuments(ShuffleBufferDataset[Document]):
    """Energon's shuffle buffer, which is also full with so many tokens.

    Books fill it sooner than pages do: a buffer of a hundred documents of 500 000 tokens would take
    400 MB of every worker, for each source.

    Args:
        documents: of one source.
        size: most documents.
        seq_len: of the rows that are made of them, 0 of prompts. As of a packing buffer, 256 rows
            of tokens, or 2^20 tokens where these are more, are the most that is held, but for the
            last document.
    """

    def __init__(
        self,
        documents: SavableDataset[Document],
        size: int,
        seq_len: int,
        *,
        worker_config: WorkerConfig,
    ):
        super().__init__(documents, size, worker_config=worker_config)
        self.most_tokens = most_tokens(seq_len)

    def __iter__(self) -> Iterator[Document]:
        buffer = self._active_buffer
        buffer.worker_start()
        documents = iter(buffer.append_iter())
        tokens = sum(len(document.tokens) for document in buffer.buffer)
        while True:
            if buffer.len_worker() < self.size and tokens < self.most_tokens:
                added = next(documents, None)
                if added is None:
                    break
                tokens += len(added.tokens)
            else:
                drawn = self._draw()
                tokens -= len(drawn.tokens)
                yield drawn
        while buffer.len_worker() > 0:
            yield self._draw()

    def _draw(self) -> Document:
        buffer = self._active_buffer
        return buffer.pop(self._worker_rng.randbelow(buffer.len_worker()))

    def config(self) -> dict[str, Any]:
        return {**super().config(), "most_tokens": self.most_tokens}
