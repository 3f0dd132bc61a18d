# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The mean over documents of the mean loss of each, also if documents are cut over batches."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from energon_ext.batch.columns import DOCUMENT_PARTS, DOCUMENT_SHARE, PARTS
from energon_ext.errors import ConfigError

if TYPE_CHECKING:
    from energon_ext.batch.packed_batch import PackedBatch


def document_mean(batch: PackedBatch, log_probs: torch.Tensor) -> torch.Tensor:
    """Return the mean over documents of the mean loss of each: float32 scalar.

    A document with ``n`` trained labels loses ``sum_i -w_i * log_probs_i / n``, and the sum over
    the documents in the batch is divided by their number. Of a document that is cut over several
    batches, a batch counts the part that it has.

    Args:
        batch: a batch of a task encoder with ``document_means=True``.
        log_probs: float [N], log-probabilities of the labels.

    Raises:
        ConfigError: the batch does not have the columns.

    Example:
        >>> import numpy as np
        >>> from energon_ext.batch.collate import BatchAssembler
        >>> from energon_ext.batch.rows import Row
        >>> row = Row([np.array([5, 6, 7, 8]), np.array([5, 6])])
        >>> batch = BatchAssembler(6, document_means=True)([row], sources=[""])
        >>> document_mean(batch, torch.tensor([-1.0, -2, -3, 0, -6, 0])).item()
        4.0
    """
    shares, parts = document_columns(batch)
    weights = batch.token_weights
    # Select rather than multiply by 0: where nothing is trained, values may be infinite.
    losses = torch.where(weights != 0, -weights * log_probs.float(), 0.0)
    return (losses * shares).sum() / parts.sum().clamp(min=1 / PARTS)


def document_columns(batch: PackedBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the columns :data:`DOCUMENT_SHARE` and :data:`DOCUMENT_PARTS` of a batch."""
    if DOCUMENT_SHARE not in batch.columns:
        raise ConfigError(
            "denominator='documents': the batch does not have the sizes of its documents; give the "
            "task encoder, or the BatchAssembler, document_means=True."
        )
    return batch.columns[DOCUMENT_SHARE], batch.columns[DOCUMENT_PARTS]
