# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Log-probabilities of preferences under a reference model, computed once and cached.

They are found by what they depend on: the files of a source, what turns its records into tokens,
the length of a row, and the name of the reference.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from energon_ext.batch.packed_batch import PackedBatch
from energon_ext.config.mix import Entry
from energon_ext.encoders.cached_samples import cached_samples, cached_source
from energon_ext.encoders.measured import use_sample
from energon_ext.encoders.text_sources import load_split, sample_entries
from energon_ext.errors import ConfigError, SampleError
from energon_ext.packing.bins import best_fit
from energon_ext.prepare.cache import (
    Cached,
    prepare_entry,
    prepare_part_of_entry,
    try_failures_again,
)
from energon_ext.prepare.documents import InputDocument
from energon_ext.prepare.job import Encoded
from energon_ext.prepare.log_probs import LogProbTable, LogProbWriter
from energon_ext.prepare.samples import sample_units
from energon_ext.samples.bad_samples import BadSamples
from energon_ext.samples.context import encoder_context
from energon_ext.samples.numbered import as_worker
from energon_ext.storage.claim import Part

if TYPE_CHECKING:
    from energon_ext.encoders.preferences import PreferencePair, PreferenceTaskEncoder

#: ``batches -> log-probabilities of the labels of each, float [N]``
LogProbsOf = Callable[[Sequence[PackedBatch]], Sequence[torch.Tensor]]

#: Pairs that are finished together: what an interrupted pass repeats, and a part of its work.
UNIT_PAIRS = 512


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
    if task_encoder.reference is None:
        raise ConfigError(
            f"{type(task_encoder).__name__}: has no reference; give it the name of the model whose "
            f"log-probabilities are written."
        )
    for entry in sample_entries(
        load_split(path, split_part, task_encoder.decoder, trusted_modules)
    ):
        cached = _cached(task_encoder, entry, log_probs_of)
        if cached.is_complete:
            try_failures_again(cached, part=part)
        elif part is None:
            prepare_entry(cached)
        else:
            prepare_part_of_entry(cached, part, jobs=1)


def open_references(
    task_encoder: PreferenceTaskEncoder, entries: Sequence[Entry]
) -> Mapping[str, LogProbTable]:
    """Return the reference's log-probabilities of all sources, by source key.

    Raises:
        ConfigError: those of a source have not been written.
    """
    found = {
        entry.key: _cached(task_encoder, entry, _compute_nothing)
        for entry in sample_entries(entries)
    }
    for key, cached in found.items():
        if not cached.is_complete:
            raise ConfigError(
                f"{key}: has no log-probabilities of the reference {task_encoder.reference!r}; "
                f"call write_reference with the model before the run."
            )
    return {key: cached.open() for key, cached in found.items()}


def _cached(task_encoder: PreferenceTaskEncoder, entry: Entry, log_probs_of: LogProbsOf) -> Cached:
    """Return the cache entry for the log-probabilities of a source."""
    source = cached_source(task_encoder, entry)
    bad = BadSamples(source.path, task_encoder.decoder)
    return cached_samples(
        entry,
        source,
        {"files": dict(source.version)},
        encoding={
            "version": 2,
            "reference": task_encoder.reference,
            "lengths": task_encoder.find_methods().identity,
            "seq_len": task_encoder.seq_len,  # longer pairs have none
        },
        encode=functools.partial(_score, task_encoder, bad, entry.key, log_probs_of),
        writer=LogProbWriter,
        meta={},
        units=sample_units(source, UNIT_PAIRS),
        seconds=None,
        open_folder=LogProbTable.open,
        verb="scored by the reference",
        command=lambda: "write_reference",
        judges=(source.bad, bad),
    )


def _compute_nothing(batches: Sequence[PackedBatch]) -> Sequence[torch.Tensor]:
    raise AssertionError("opening a table computes nothing")


def _score(
    task_encoder: PreferenceTaskEncoder,
    bad: BadSamples,
    key: str,
    log_probs_of: LogProbsOf,
    documents: Sequence[InputDocument],
) -> list[Encoded | SampleError]:
    """Return the log-probabilities of the trained tokens of each pair, or why it is refused."""
    results: list[Encoded | SampleError] = []
    pairs: dict[int, PreferencePair] = {}  # those that fit a row, by their place in the results
    methods = task_encoder.find_methods()
    with as_worker(), encoder_context(source_key=key):
        for document in documents:
            if document.sample is None:  # excluded by the split
                results.append(Encoded([(np.zeros(0, np.float32), None)]))
                continue
            # As a run encodes it: the tokens of a run must be those that are scored.
            pair = use_sample(
                methods, bad, document, lambda methods, sample: methods.encode(sample)
            )
            if isinstance(pair, SampleError):
                results.append(pair)
                continue
            # NaN for pairs that are longer than a row, which no run reads.
            results.append(Encoded([(np.full(_count(pair), np.nan, np.float32), None)]))
            if task_encoder.length_of(pair) <= task_encoder.seq_len:
                pairs[len(results) - 1] = pair
        rows, batches = _batches(task_encoder, key, pairs)
    for row, batch, log_probs in zip(rows, batches, log_probs_of(batches), strict=True):
        trained = batch.token_weights.numpy() != 0
        values = log_probs.detach().float().cpu().numpy()[trained]
        if not np.isfinite(values).all():
            raise ConfigError(
                f"{documents[row[0]].origin}: the reference {task_encoder.reference!r} has a "
                f"log-probability of {values[~np.isfinite(values)][0]}; is the model loaded?"
            )
        counts = [_count(pairs[place]) for place in row]
        for place, part in zip(row, np.split(values, np.cumsum(counts)[:-1])):
            results[place] = Encoded([(part, None)])
    return results


def _count(pair: PreferencePair) -> int:
    """Return the number of trained tokens of a pair."""
    return sum(int(mask.sum()) for mask in pair.masks())


def _batches(
    task_encoder: PreferenceTaskEncoder, key: str, pairs: Mapping[int, PreferencePair]
) -> tuple[list[list[int]], list[PackedBatch]]:
    """Return batches of one row each, and the places of the pairs in them."""
    lengths = {place: task_encoder.length_of(pair) for place, pair in pairs.items()}
    ordered = sorted(pairs, key=lambda place: -lengths[place])
    bins: dict[int, list[int]] = {}
    found = best_fit([lengths[place] for place in ordered], task_encoder.seq_len)
    for place, number in zip(ordered, found.tolist()):
        bins.setdefault(number, []).append(place)
    rows = list(bins.values())
    with encoder_context(source_key=key, source_keys=(key,)):
        return rows, [
            task_encoder.batch([task_encoder.pack_selected_samples([pairs[n] for n in row])])
            for row in rows
        ]
