# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The weight of a source in the loss, apart from its share of the rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch

from energon_ext.batch.columns import LABEL_WEIGHTS, LOSS_WEIGHT

if TYPE_CHECKING:
    from energon_ext.batch.packed_batch import PackedBatch

    B = TypeVar("B", bound=PackedBatch)

# A batch with such weights has two columns: that of the source at each position (LOSS_WEIGHT), and
# the token weights without it (LABEL_WEIGHTS).


def weigh_sources(batch: B, weights: Mapping[str, float]) -> B:
    """Return a batch whose token weights are multiplied by the weights of their sources.

    Args:
        weights: by key of the source; 1 for all others.

    Example:
        >>> from energon_ext.batch.collate import BatchAssembler
        >>> from energon_ext.batch.rows import Row
        >>> rows = [Row([np.array([5, 6])], source=key) for key in ("code", "web")]
        >>> batch = weigh_sources(BatchAssembler(2)(rows, sources=["code", "web"]), {"web": 0.25})
        >>> batch.token_weights.tolist(), batch.columns["label_weights"].tolist()
        ([1.0, 0.0, 0.25, 0.0], [1.0, 0.0, 1.0, 0.0])
    """
    # NumPy, as torch would wake all its threads for every batch; padding is the last source, 1.
    of_source = np.array([*(weights.get(key, 1.0) for key in batch.sources), 1.0], np.float32)
    lengths = np.diff(batch.cu_seqlens.numpy())
    each = torch.from_numpy(np.repeat(of_source[batch.source_ids.numpy()], lengths))
    columns = {**batch.columns, LOSS_WEIGHT: each, LABEL_WEIGHTS: batch.token_weights}
    return dataclasses.replace(batch, token_weights=batch.token_weights * each, columns=columns)


def separate_weights(batch: B) -> tuple[B, torch.Tensor | None]:
    """Undo :func:`weigh_sources`: return the batch without the weights, and these, [N] or None."""
    if LOSS_WEIGHT not in batch.columns:
        return batch, None
    columns = dict(batch.columns)
    each, weights = columns.pop(LOSS_WEIGHT), columns.pop(LABEL_WEIGHTS)
    return dataclasses.replace(batch, token_weights=weights, columns=columns), each
