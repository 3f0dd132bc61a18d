# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Losses of single documents, and their mean, also if documents are cut over batches."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from energon_ext.batch.columns import DOCUMENT, DOCUMENT_PARTS, DOCUMENT_SHARE, PARTS, VISIT
from energon_ext.errors import ConfigError
from energon_ext.losses.sources import separate_weights

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


def document_losses(batch: PackedBatch, log_probs: torch.Tensor) -> torch.Tensor:
    """Return the loss of each segment, for a file of losses per document: float64 [n, 5].

    The weights of labels and sources decide only which labels count: those whose own weight is not
    0. Nothing here waits for the device of the batch.

    Args:
        batch: a batch of a task encoder with ``document_numbers=True``.
        log_probs: float [N], log-probabilities of the labels.

    Returns:
        Index of the source, number of the document, visit, sum of ``-log_probs`` over the trained
        labels, and their number.

    Raises:
        ConfigError: the batch does not have the numbers.

    Example:
        >>> import numpy as np
        >>> from energon_ext.batch.collate import BatchAssembler
        >>> from energon_ext.batch.columns import Column
        >>> from energon_ext.batch.rows import Row
        >>> number = Column("int64", per="document", fill=-1)
        >>> values = {"document": [np.array(7)], "visit": [np.array(0)]}
        >>> row = Row([np.array([5, 6, 7])], columns=values)
        >>> batch = BatchAssembler(4)([row], [""], {"document": number, "visit": number})
        >>> document_losses(batch, torch.tensor([-1.0, -2, -3, 0])).tolist()
        [[0.0, 7.0, 0.0, 3.0, 2.0], [-1.0, -1.0, -1.0, 0.0, 0.0]]
    """
    if DOCUMENT not in batch.segments:
        raise ConfigError(
            "document_losses: the batch does not have the numbers of its documents; give the task "
            "encoder document_numbers=True."
        )
    batch, _ = separate_weights(batch)
    trained = batch.token_weights != 0
    losses = torch.where(trained, -log_probs.double(), 0.0)
    numbers = torch.ones_like(batch.source_ids, dtype=torch.int64).cumsum(0) - 1
    # With output_size, torch does not wait for a GPU.
    segment_of = torch.repeat_interleave(
        numbers, batch.segment_lengths().long(), output_size=batch.num_tokens
    )
    sums = losses.new_zeros(len(numbers), 2)
    sums.index_add_(0, segment_of, torch.stack([losses, trained.double()], dim=1))
    about = batch.source_ids, batch.segments[DOCUMENT], batch.segments[VISIT]
    return torch.cat([torch.stack([each.double() for each in about], dim=1), sums], dim=1)


def document_columns(batch: PackedBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the columns :data:`DOCUMENT_SHARE` and :data:`DOCUMENT_PARTS` of a batch."""
    if DOCUMENT_SHARE not in batch.columns:
        raise ConfigError(
            "denominator='documents': the batch does not have the sizes of its documents; give the "
            "task encoder, or the BatchAssembler, document_means=True."
        )
    return batch.columns[DOCUMENT_SHARE], batch.columns[DOCUMENT_PARTS]
