# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Divides the examples of an epoch among documents."""

from typing import Sequence

import numpy as np

from energon_ext.elementwise import power
from energon_ext.errors import ConfigError
from energon_ext.splice.config import MultiSpliceConfig

#: Exponent of the length in the share of a document; ``by_temperature`` uses ``balance_tau``.
_TAU = {"by_coverage": 1.0, "by_document": 0.0}

#: Maximum examples per document and epoch; products of two larger numbers could overflow int64.
MAX_EXAMPLES = 2**31


def document_quotas(
    doc_lengths: Sequence[int] | np.ndarray,
    epoch_length: int,
    balance_mode: str = "by_coverage",
    balance_tau: float = 1.0,
    doc_weights: Sequence[float] | np.ndarray | None = None,
) -> np.ndarray:
    """Divide an epoch among documents in proportion to length^tau times their weights.

    Rounds by largest remainders; ties go to the lower index.

    Args:
        doc_lengths: tokens of each document, >= 1.
        epoch_length: examples in the epoch, >= 1.
        balance_mode: ``by_coverage`` (tau 1), ``by_document`` (tau 0) or ``by_temperature``.
        balance_tau: tau of ``by_temperature``.
        doc_weights: factor of each document, >= 0; None for 1.

    Returns:
        int64 [documents]; their sum is ``epoch_length``.

    Raises:
        ConfigError: unknown mode, no document, a tau outside [0, 1], weights that are negative,
            not finite, all 0 or not one per document, more than 2^31 examples of a document.

    Example:
        >>> document_quotas([10_000, 5_000, 2_000], 17).tolist()
        [10, 5, 2]
        >>> document_quotas([10_000, 5_000, 2_000], 17, "by_document").tolist()
        [6, 6, 5]
    """
    config = MultiSpliceConfig(
        epoch_length=epoch_length,
        balance_mode=balance_mode,
        balance_tau=balance_tau,
        doc_weights=None if doc_weights is None else list(doc_weights),
    )
    lengths = np.asarray(doc_lengths)
    if not lengths.size or lengths.dtype.kind not in "iu" or lengths.min() < 1:
        needed = "integers >= 1 are needed, one or more"
        raise ConfigError(f"doc_lengths: {lengths.tolist()!r:.80} found, {needed}.")
    return _largest_remainders(_parts(config, lengths, epoch_length), epoch_length)


def epoch_quotas(config: MultiSpliceConfig, lengths: np.ndarray, pairs: np.ndarray) -> np.ndarray:
    """Return the examples of each document per epoch, for a splice of many documents.

    Documents without a pair get none, the others as in :class:`MultiSpliceConfig`. Returns int64
    [documents], the same for every epoch, unless a document would never be shown; then float64
    [documents], averages over epochs for :func:`turning_quotas`.
    """
    if config.balance_mode == "every_pair":
        return pairs
    present = pairs > 0
    size = max(1, int(lengths[present].sum()) // config.content_stride)
    if config.balance_mode == "by_document":
        size = int(present.sum()) * int(pairs.max())
    size = config.epoch_length or size
    parts = _parts(config, lengths, size, present)
    quotas = _largest_remainders(parts, size)
    return parts if (quotas[parts > 0] == 0).any() else quotas


def turning_quotas(parts: np.ndarray, offset: float) -> np.ndarray:
    """Return the quotas of one epoch by systematic sampling.

    With largest remainders, a document whose part is below one example would never be shown. Here,
    documents are laid end to end on a line, each as long as its part, and get one example for each
    mark they contain. Marks are one example apart and shifted by ``offset``.

    Parts are average examples per epoch; their sum must be an integer and is the sum of the quotas.
    If ``offset`` is uniform in ``[0, 1)``, each document gets its part on average.

    Example:
        >>> parts = np.array([2.5, 0.5, 0.5, 0.5])
        >>> [turning_quotas(parts, offset).tolist() for offset in (0.0, 0.25, 0.75)]
        [[2, 1, 0, 1], [2, 1, 0, 1], [3, 0, 1, 0]]
    """
    ends = parts.cumsum()
    size = round(ends[-1])
    ends[ends == ends[-1]] = size  # the sum of floats may be slightly off
    marks = np.minimum(np.floor(ends + offset), size)
    return np.diff(marks, prepend=0).astype(np.int64)


def _parts(
    config: MultiSpliceConfig,
    lengths: np.ndarray,
    epoch_length: int,
    present: np.ndarray | bool = True,
) -> np.ndarray:
    """Return the examples of each document before rounding; 0 if it is not present."""
    tau = _TAU.get(config.balance_mode, config.balance_tau)
    shares = power(lengths, tau) * present
    weights = config.doc_weights
    if weights is not None and len(weights) != len(lengths):
        found = f"{len(weights)} found for {len(lengths)} documents"
        raise ConfigError(f"doc_weights: {found}; give one per document, in the order of choice.")
    shares *= 1.0 if weights is None else weights
    if not shares.any():
        raise ConfigError("doc_weights: 0 found for every document that has a pair; raise one.")
    return shares * epoch_length / shares.sum()


def _largest_remainders(parts: np.ndarray, epoch_length: int) -> np.ndarray:
    if parts.max() > MAX_EXAMPLES:
        found = f"{epoch_length} found, which gives one document {parts.max():.0f} examples"
        raise ConfigError(f"epoch_length: {found}; at most {MAX_EXAMPLES} are allowed.")
    quotas = np.floor(parts).astype(np.int64)
    # Rounded so that remainders that differ only by floating-point error are ties.
    remainders = np.round(parts - quotas, 9)
    order = np.argsort(-remainders, kind="stable")
    quotas[order[: epoch_length - int(quotas.sum())]] += 1
    return quotas
