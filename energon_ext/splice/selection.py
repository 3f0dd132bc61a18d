# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Chooses documents by their lengths and keys alone."""

import fnmatch
from typing import Sequence

import numpy as np

from energon_ext.errors import ConfigError, log_of
from energon_ext.keyed import KeyedPermutation
from energon_ext.splice.config import SpliceFields

logger = log_of(__name__)


def select_documents(
    lengths: np.ndarray,
    config: SpliceFields,
    *,
    seq_len: int,
    keys: Sequence[str] | None = None,
    source: str = "",
) -> np.ndarray:
    """Choose the documents that a configuration asks for.

    Args:
        lengths: int64 [documents], tokens of each document of a source, in its order.
        config: configuration for one document or many.
        seq_len: S, positions per frame, for ``restrict_to_training_subset``.
        keys: sample keys, for ``doc_key``.
        source: key of the source; the random choice depends on it.

    Returns:
        int64, numbers of the chosen documents in the order of choice; ties to the lower number.

    Raises:
        ConfigError: there are no documents, ``doc_index`` is too large or ``doc_key`` matches none.

    Example:
        >>> from energon_ext.splice import MultiSpliceConfig
        >>> lengths = np.array([7, 90, 50, 60])
        >>> select_documents(lengths, MultiSpliceConfig(num_docs=2, max_doc_length=60), seq_len=8)
        array([3, 2])
    """
    lengths = np.asarray(lengths, np.int64)
    candidates = np.flatnonzero(lengths > 0)
    limit = None
    if config.restrict_to_training_subset:
        assert config.max_train_batches and config.initial_batch_size  # checked with the fields
        limit = config.max_train_batches * config.initial_batch_size * seq_len
        candidates = candidates[np.cumsum(lengths)[candidates] <= limit]
    pattern = getattr(config, "doc_key", None)
    if pattern is not None:
        candidates = _matching(candidates, keys, pattern, source)
    if not candidates.size:
        within = "" if limit is None else f" within its first {limit} tokens"
        found = f"no document to choose from among {len(lengths)}{within}"
        raise ConfigError(f"Source {source}: {found}; prepare it again, or widen the subset.")
    least, most = config.min_doc_length or 1, config.max_doc_length or np.iinfo(np.int64).max
    fitting = candidates[(least <= lengths[candidates]) & (lengths[candidates] <= most)]
    index = getattr(config, "doc_index", None)
    if index is not None:
        if index >= len(lengths):
            has = f"source {source} has {len(lengths)} documents"
            raise ConfigError(f"doc_index: {index} found, {has}.")
        if index in fitting:
            return np.array([index])
        logger.warning(
            "doc_index %d of source %s (%d tokens) is not among the documents that the other "
            "fields allow; choosing by doc_select_mode: %s instead.",
            *(index, source, lengths[index], config.doc_select_mode),
        )
    if not fitting.size:
        logger.warning(
            "No document of source %s has %s to %s tokens; choosing the longest instead.",
            *(source, config.min_doc_length or 1, config.max_doc_length or "any number of"),
        )
        return _by_policy(candidates, lengths, "longest", config, source)
    return _by_policy(fitting, lengths, config.doc_select_mode, config, source)


def _by_policy(
    candidates: np.ndarray, lengths: np.ndarray, policy: str, config: SpliceFields, source: str
) -> np.ndarray:
    count = min(getattr(config, "num_docs", 1), len(candidates))
    if policy == "random":
        seed = getattr(config, "seed", getattr(config, "content_seed", 0))
        order = KeyedPermutation(len(candidates), f"documents/{source}/{seed}/{count}")
        return candidates[order(np.arange(count))]
    if policy == "longest":
        candidates = candidates[np.argsort(-lengths[candidates], kind="stable")]
    elif policy == "shortest":
        candidates = candidates[np.argsort(lengths[candidates], kind="stable")]
    return candidates[:count]


def _matching(
    candidates: np.ndarray, keys: Sequence[str] | None, pattern: str, source: str
) -> np.ndarray:
    if keys is None:
        raise ConfigError(f"doc_key: the documents of source {source} have no keys; use doc_index.")
    matching = [index for index in candidates if fnmatch.fnmatchcase(keys[index], pattern)]
    if not matching:
        missing = f"no sample key of source {source} matches"
        raise ConfigError(f"doc_key: {pattern!r} found, {missing}; its first is {keys[0]!r}.")
    return np.array(matching, np.int64)
