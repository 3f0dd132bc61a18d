# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Log-probabilities of preferences under a reference model, computed once and cached."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from energon_ext.batch.packed_batch import PackedBatch
from energon_ext.config.mix import sample_entries
from energon_ext.encoders.cached_samples import use_sample
from energon_ext.encoders.load import load_split
from energon_ext.encoders.measured import random_of
from energon_ext.encoders.pair_task import PairTask, PreferencePair, encode_log_probs
from energon_ext.encoders.preferences import PreferenceTaskEncoder
from energon_ext.errors import ConfigError, SampleError
from energon_ext.packing.bins import best_fit_decreasing
from energon_ext.prepare.cache import (
    prepare_entry,
    prepare_part_of_entry,
    try_failures_again,
)
from energon_ext.prepare.documents import InputDocument
from energon_ext.prepare.job import Encoded
from energon_ext.samples.bad_samples import BadSamples
from energon_ext.samples.context import encoder_context
from energon_ext.samples.numbered import as_worker
from energon_ext.storage.claim import Part

#: ``batches -> log-probabilities of the labels of each, float [N]``
LogProbsOf = Callable[[Sequence[PackedBatch]], Sequence[torch.Tensor]]


def write_reference(
    path: str | Path,
    task_encoder: PreferenceTaskEncoder,
    log_probs_of: LogProbsOf,
    *,
    split_part: str = "train",
    part: Part | None = None,
    trusted_modules: Iterable[str] = (),
) -> None:
    """Compute and cache what the reference model says of all pairs, unless that has been done.

    The result lies next to the table of lengths, and a run whose encoder names the same reference
    finds it. A pass that is interrupted continues where it was; another one tries pairs again that
    failed.

    Args:
        path: metadataset YAML, prepared folder or JSONL file.
        task_encoder: encoder of the run, with the name of its ``reference``.
        log_probs_of: returns the log-probabilities of the labels of each batch, float [N], for
            batches of one row; :func:`energon_ext.megatron.write_reference_of` has one for models
            of Megatron-core.
        split_part: split of the metadataset.
        part: the part of the work that this process does, such as ``Part(0, 8)`` on one of eight
            processes that share a file system; None for all.
        trusted_modules: modules whose classes and functions the YAML may name.

    Raises:
        ConfigError: the encoder names no reference, or a log-probability is not finite.
    """
    task = task_encoder.task()
    if task.reference is None:
        raise ConfigError(
            f"{type(task_encoder).__name__}: has no reference; give it the name of the model whose "
            f"log-probabilities are written."
        )
    entries = load_split(path, split_part, task_encoder.decoder, trusted_modules)
    for entry in sample_entries(entries):
        cached = task.cached_scores(entry, functools.partial(_score, task, log_probs_of))
        if cached.is_complete:
            try_failures_again(cached, part=part)
        elif part is None:
            prepare_entry(cached)
        else:
            prepare_part_of_entry(cached, part, jobs=1)


def _score(
    task: PairTask,
    log_probs_of: LogProbsOf,
    key: str,
    bad: BadSamples,
    documents: Sequence[InputDocument],
) -> list[Encoded | SampleError]:
    """Return the log-probabilities of the trained tokens of each pair, or why it is refused."""
    results: list[Encoded | SampleError] = []
    pairs: dict[int, PreferencePair] = {}  # those that fit a row, by their place in the results
    methods = task.methods
    with as_worker(), encoder_context(source_key=key):
        for document in documents:
            if document.sample is None:  # excluded by the split
                results.append(encode_log_probs(np.zeros(0)))
                continue
            # As a run encodes it: the tokens of a run must be those that are scored.
            with random_of(document):
                pair = use_sample(bad, document, methods.encode)
            if isinstance(pair, SampleError):
                results.append(pair)
                continue
            # NaN for pairs that are longer than a row, which no run reads.
            results.append(encode_log_probs(np.full(_count(pair), np.nan)))
            if task.length_of(pair) <= methods.packer.seq_len:
                pairs[len(results) - 1] = pair
        rows, batches = _batches(task, key, pairs)
    for row, batch, log_probs in zip(rows, batches, log_probs_of(batches), strict=True):
        trained = batch.token_weights.numpy() != 0
        values = log_probs.detach().float().cpu().numpy()[trained]
        if not np.isfinite(values).all():
            raise ConfigError(
                f"{documents[row[0]].origin}: the reference {task.reference!r} has a "
                f"log-probability of {values[~np.isfinite(values)][0]}; is the model loaded?"
            )
        counts = [_count(pairs[place]) for place in row]
        for place, part in zip(row, np.split(values, np.cumsum(counts)[:-1])):
            results[place] = encode_log_probs(part)
    return results


def _count(pair: PreferencePair) -> int:
    """Return the number of trained tokens of a pair."""
    return sum(int(mask.sum()) for mask in pair.masks())


def _batches(
    task: PairTask, key: str, pairs: Mapping[int, PreferencePair]
) -> tuple[list[list[int]], list[PackedBatch]]:
    """Return batches of one row each, and the places of the pairs in them."""
    pack, batch = task.methods.pack, task.encoder.batch
    assert pack is not None, "pairs have lengths"
    places, lengths = [*pairs], [*map(task.length_of, pairs.values())]
    bins = best_fit_decreasing(lengths, task.methods.packer.seq_len)
    rows = [[places[n] for n in row] for row in bins]
    with encoder_context(source_key=key, source_keys=(key,)):
        return rows, [batch([pack([pairs[place] for place in row])]) for row in rows]
