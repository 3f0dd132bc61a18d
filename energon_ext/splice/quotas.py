# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""How many examples of an epoch each document gets."""

from typing import Sequence

import numpy as np

from energon_ext.errors import ConfigError
from energon_ext.splice.config import MultiSpliceConfig

#: Exponent of the length in the share of a document; ``by_temperature`` has its own.
_TAU = {"by_coverage": 1.0, "by_document": 0.0}

#: Examples of a document in an epoch; with more, products of two of them could leave int64.
MOST_EXAMPLES = 2**31


def document_quotas(
    doc_lengths: Sequence[int] | np.ndarray,
    epoch_length: int,
    balance_mode: str = "by_coverage",
    balance_tau: float = 1.0,
    doc_weights: Sequence[float] | np.ndarray | None = None,
) -> np.ndarray:
    """Divide an epoch among documents in proportion to length^tau, times their weights.

    Largest remainders, ties to the lower index.

    Args:
        doc_lengths: tokens of each document, >= 1.
        epoch_length: examples in the epoch, >= 1.
        balance_mode: ``by_coverage`` (tau 1), ``by_document`` (tau 0) or ``by_temperature``.
        balance_tau: for ``by_temperature``.
        doc_weights: factor of each document, >= 0; None for 1.

    Returns:
        int64 [documents]; their sum is ``epoch_length``.

    Raises:
        ConfigError: another mode, no document, a tau outside 0 .. 1, weights that are negative,
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
    """Examples of each document in an epoch of a splice of many documents.

    Documents without a pair get none; see :class:`MultiSpliceConfig` for the others. These are
    int64 [documents], the same in every epoch. Or, where that leaves a document out, float64
    [documents], their averages over epochs: see :func:`turning_quotas`.
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
    """Quotas of one epoch by systematic sampling: a document has one where its parts pass a mark.

    With largest remainders a document whose part is below one example would never come up. Here
    documents lie one behind another on a line, each as long as its part, with marks one example
    apart, which ``offset`` moves.

    The parts are examples in an epoch on average, and their sum is an integer; so is that of the
    quotas. An ``offset`` that is drawn evenly in ``[0, 1)`` gives each document its part.

    Example:
        >>> parts = np.array([2.5, 0.5, 0.5, 0.5])
        >>> [turning_quotas(parts, offset).tolist() for offset in (0.0, 0.25, 0.75)]
        [[2, 1, 0, 1], [2, 1, 0, 1], [3, 0, 1, 0]]
    """
    ends = parts.cumsum()
    size = round(ends[-1])
    ends[ends == ends[-1]] = size  # which a sum of floats may miss
    marks = np.minimum(np.floor(ends + offset), size)
    return np.diff(marks, prepend=0).astype(np.int64)


def _parts(
    config: MultiSpliceConfig,
    lengths: np.ndarray,
    epoch_length: int,
    present: np.ndarray | bool = True,
) -> np.ndarray:
    """Examples of each document before they are rounded; 0 for one that is not present."""
    tau = _TAU.get(config.balance_mode, config.balance_tau)
    shares = lengths.astype(np.float64) ** tau * present
    weights = config.doc_weights
    if weights is not None and len(weights) != len(lengths):
        found = f"{len(weights)} found for {len(lengths)} documents"
        raise ConfigError(f"doc_weights: {found}; one for each is needed, in the order of choice.")
    shares *= 1.0 if weights is None else weights
    if not shares.any():
        raise ConfigError("doc_weights: 0 found for every document that has a pair; raise one.")
    return shares * epoch_length / shares.sum()


def _largest_remainders(parts: np.ndarray, epoch_length: int) -> np.ndarray:
    if parts.max() > MOST_EXAMPLES:
        found = f"{epoch_length} examples give a document {parts.max():.0f}"
        most = f"at most {MOST_EXAMPLES} are possible"
        raise ConfigError(f"epoch_length: {found}, {most}; use a shorter epoch.")
    quotas = np.floor(parts).astype(np.int64)
    # Rounded, so that remainders which are equal but for the error of floats are a tie.
    remainders = np.round(parts - quotas, 9)
    order = np.argsort(-remainders, kind="stable")
    quotas[order[: epoch_length - int(quotas.sum())]] += 1
    return quotas
