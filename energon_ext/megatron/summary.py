# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""What a training step consumed, over all data-parallel ranks."""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import Any, Iterable

import torch.distributed as dist
from megatron.core import parallel_state

from energon_ext.batch.packed_batch import PackedBatch

_HASHED_FIELDS = ("tokens", "labels", "token_weights", "cu_seqlens", "source_ids")


def summarize_step(batches: Iterable[PackedBatch]) -> dict[str, Any]:
    """Return hash, tokens and documents of a step; all data-parallel ranks call this together.

    Two runs whose hashes are equal were trained on the same tokens, labels, weights, segments and
    sources in the same order. The hash depends on how the global batch is cut into micro-batches
    and ranks.

    Args:
        batches: the micro-batches that this rank drew, in order, on the CPU.

    Returns:
        ``batch_hash`` (SHA-1 in hexadecimal), ``tokens`` and ``documents`` (source key to count,
        sources with none left out).
    """
    digest = hashlib.sha1()
    tokens: Counter[str] = Counter()
    documents: Counter[str] = Counter()
    for batch in batches:
        for name in _HASHED_FIELDS:
            digest.update(getattr(batch, name).numpy().tobytes())
        tokens.update(batch.tokens_per_source())
        documents.update(batch.documents_per_source())
    group = parallel_state.get_data_parallel_group()
    ranks: list[Any] = [None] * group.size()
    dist.all_gather_object(ranks, (digest.hexdigest(), tokens, documents), group=group)
    digests, tokens_of_ranks, documents_of_ranks = zip(*ranks)
    return {
        "batch_hash": hashlib.sha1("".join(digests).encode()).hexdigest(),
        "tokens": dict(sum(tokens_of_ranks, Counter())),
        "documents": dict(sum(documents_of_ranks, Counter())),
    }
