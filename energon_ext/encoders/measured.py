# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Sample lengths of any TaskEncoder, measured once and cached."""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from megatron.energon import TaskEncoder

from energon_ext.config.mix import Entry
from energon_ext.encoders.cached_samples import (
    cached_samples,
    cached_source,
    open_cached,
    stored_source,
    use_sample,
)
from energon_ext.errors import ConfigError, SampleError, log_of
from energon_ext.keyed import KeyedPermutation
from energon_ext.prepare.cache import Cached, ensure_prepared
from energon_ext.prepare.columns import ColumnsWriter
from energon_ext.prepare.documents import InputDocument, Unit
from energon_ext.prepare.job import Arrays, Encoded
from energon_ext.prepare.lengths import COLUMNS, COSTS, LENGTHS, LengthTable
from energon_ext.prepare.samples import SampleSource, sample_units, unit_of
from energon_ext.samples.bad_samples import BadSamples
from energon_ext.samples.context import encoder_context
from energon_ext.samples.methods import SampleMethods
from energon_ext.samples.numbered import as_worker
from energon_ext.samples.packers import WholePacker
from energon_ext.samples.reader import keyed_random
from energon_ext.storage.object_store import file_name

logger = log_of(__name__)

#: Approximate seconds per sample on one core: from its size alone, or by encoding it.
SECONDS_BY_SIZE, SECONDS_BY_ENCODING = 0.001, 0.02

#: Samples of all sources that a start measures again, and about how long that may take.
_COMPARED, _COMPARED_SECONDS = 16, 1.0


def ensure_measured(
    encoder: TaskEncoder, methods: SampleMethods, entries: Sequence[Entry]
) -> dict[str, LengthTable]:
    """Return the lengths of sources of samples, by source key; measure those that are missing."""
    sources = ((entry, cached_source(encoder, entry)) for entry in entries)
    cached = {entry.key: cached_lengths(methods, entry, source) for entry, source in sources}
    before = [entry for entry in entries if cached[entry.key].is_complete]
    ensure_prepared(list(cached.values()))
    tables: dict[str, LengthTable] = {key: item.open() for key, item in cached.items()}
    _compare_some(encoder, methods, before, tables)
    for key, table in tables.items():
        if table.num_too_long:
            logger.warning(
                "%s: %d of %d samples are longer than a row of %d tokens and are skipped.",
                *(key, table.num_too_long, len(table), table.longest),
            )
    return tables


def _compare_some(
    encoder: TaskEncoder,
    methods: SampleMethods,
    entries: Sequence[Entry],
    tables: Mapping[str, LengthTable],
) -> None:
    """Measure a few samples again, as a check of what only the user knows: the fingerprint.

    Those that fail now are skipped by the run. Lengths that are random even with equal random
    numbers cannot be compared.

    Raises:
        ConfigError: the length of a sample is not that of the table.
    """
    seconds = _seconds_of(methods)
    count = min(_COMPARED, max(1, int(_COMPARED_SECONDS / seconds)))
    order = KeyedPermutation(max(1, len(entries)), "compared")
    chosen = [entries[n] for n in order(np.arange(min(count, len(entries)))).tolist()]
    for entry in chosen:
        measured, share = tables[entry.key].measured, -(-count // len(chosen))
        tried = np.arange(min(4 * share, len(measured)))
        tried = KeyedPermutation(max(1, len(measured)), "compared")(tried)
        numbers = tried[measured[tried] > 0][:share]
        measure = functools.partial(measure_again, encoder, methods, entry, numbers.tolist())
        now = measure()
        different = (now != measured[numbers]) & (now > 0)
        if different.any() and np.array_equal(measure(), now):
            place = int(different.argmax())
            raise ConfigError(
                f"{entry.key}: sample {numbers[place]} has {now[place]} tokens, but had "
                f"{measured[numbers[place]]} when it was measured. If an option of the encoder has "
                f"changed, change its encoding_fingerprint, and lengths are measured again."
            )


def _seconds_of(methods: SampleMethods) -> float:
    """Return about how long it takes to measure a sample."""
    seconds = SECONDS_BY_SIZE if methods.sample_length else SECONDS_BY_ENCODING
    return methods.seconds_per_sample or seconds


def cached_lengths(methods: SampleMethods, entry: Entry, source: SampleSource) -> Cached:
    """Return the cache entry for the lengths of a source, which may not exist yet."""
    units = _units(entry, source)
    path = entry.metadataset or entry.dataset.paths[0]
    bad = BadSamples(source.path, methods.decoder, methods.tolerance)
    return cached_samples(
        entry,
        source,
        _files_of(source, units),
        encoding=methods.identity,
        encode=functools.partial(measure_all, methods, bad, entry.key),
        writer=functools.partial(ColumnsWriter, columns=COLUMNS, own={}),
        units=units,
        seconds=source.count * _seconds_of(methods),
        open_folder=functools.partial(LengthTable.open, longest=methods.packer.seq_len),
        verb="measured",
        command=lambda: f"energon-ext measure {path} --encoder MODULE:FUNCTION",
        grows=True,
        judges=(source.bad, bad),
    )


def find_measured(entry: Entry, encoding: Any, row_tokens: int) -> LengthTable:
    """Return the lengths of a source of samples that some encoder has measured.

    Args:
        encoding: names the lengths.
        row_tokens: positions of a row; longer samples are in no row.

    Raises:
        EncoderNeededError: there are none.
    """
    packer = WholePacker(row_tokens)
    methods = SampleMethods(name="the run's encoder", packer=packer, identity=encoding)
    table: LengthTable = open_cached(cached_lengths(methods, entry, stored_source(entry)))
    return table


def _files_of(source: SampleSource, units: Sequence[Unit]) -> dict[str, Any]:
    """Return what cached lengths depend on in the files of a source."""
    return {"path": source.path, "first": units[0].description["path"]}  # differs by split


def measure_all(
    methods: SampleMethods, bad: BadSamples, key: str, documents: Sequence[InputDocument]
) -> list[Encoded | SampleError]:
    """Return the length and cost of each sample of a source, or why it cannot be measured."""
    with as_worker(), encoder_context(source_key=key):
        return [_measure(methods, bad, document, length_and_cost) for document in documents]


def measure_again(
    encoder: TaskEncoder,
    methods: SampleMethods,
    entry: Entry,
    numbers: Sequence[int],
    *,
    in_a_run: bool = False,
) -> np.ndarray:
    """Measure some samples as before or, for a run, encoded with other random numbers.

    Returns:
        Their lengths, int64 [n]; 0 for a sample that cannot be measured.
    """
    source = cached_source(encoder, entry)
    source.bad.has_worked = True  # when the samples were measured
    measure, purpose = length_and_cost, "measured"
    if in_a_run:
        measure, purpose = _encoded_length_and_cost, "checked"
    pick = unit_of(source, range(source.count), {"path": source.path}).pick
    assert pick is not None, "samples are read by number"
    documents = [item for item in pick(numbers) if isinstance(item, InputDocument)]
    with as_worker(), encoder_context(source_key=entry.key):
        measured = [_measure(methods, source.bad, each, measure, purpose) for each in documents]
    tokens = [
        0 if isinstance(each, SampleError) else len(each.documents[0][0]) for each in measured
    ]
    return np.array(tokens, np.int64)


def _measure(
    methods: SampleMethods,
    bad: BadSamples,
    document: InputDocument,
    measure: Callable[[SampleMethods, Any], Encoded],
    purpose: str = "measured",
) -> Encoded | SampleError:
    if document.sample is None:  # excluded by the split
        return Encoded([(np.zeros(0, np.int64), None)])
    with random_of(document, purpose):
        return use_sample(bad, document, functools.partial(measure, methods))


def random_of(document: InputDocument, purpose: str = "measured") -> AbstractContextManager[None]:
    """Seed the random numbers of an encoder's methods for a sample and a purpose."""
    return keyed_random(f"{purpose}/{document.origin}")


def length_and_cost(methods: SampleMethods, sample: Any) -> Encoded:
    """Return the length and cost of a cooked sample as columns."""
    if methods.sample_length is None:
        return _encoded_length_and_cost(methods, sample)
    return Encoded([_to_columns(f"{methods.name}.sample_length", methods.sample_length(sample))])


def _encoded_length_and_cost(methods: SampleMethods, sample: Any) -> Encoded:
    assert methods.length_of is not None, "samples are packed"
    encoded = methods.encode(sample)
    columns = _to_columns(f"{methods.name}.length_of", methods.length_of(encoded))
    notes = getattr(encoded, "notes", None)  # of our own samples; a user's may mean something else
    return Encoded([columns], notes if isinstance(notes, Counter) else {})


def _to_columns(method: str, result: Any) -> Arrays:
    tokens, cost = result if isinstance(result, tuple) else (result, 0.0)
    is_integer = isinstance(tokens, (int, np.integer)) and not isinstance(tokens, bool)
    if not is_integer or not 1 <= tokens < 2**31:
        raise ConfigError(
            f"{method}: {result!r} found, a number of tokens >= 1 is needed, alone or with a cost."
        )
    no_tokens = np.broadcast_to(np.int64(0), int(tokens))  # counted, but not known
    return no_tokens, None, {LENGTHS: tokens, COSTS: np.float32(cost)}


def _units(entry: Entry, source: SampleSource) -> list[Unit]:
    """Return one unit per shard, so that new shards leave old units as they are; else ranges."""
    shards = getattr(entry.dataset, "shards", None)
    if not shards or hasattr(entry.dataset, "join_index"):
        return sample_units(source)
    ends = np.cumsum([shard.count for shard in shards]).tolist()
    return [
        unit_of(source, range(end - shard.count, end), _version(shard))
        for shard, end in zip(shards, ends)
    ]


def _version(shard: Any) -> dict[str, Any]:
    """Return JSON values that change whenever a shard changes."""
    version = {"path": str(shard.path), "samples": shard.count}
    file = file_name(shard.path)
    if os.path.isfile(file):
        status = os.stat(file)
        version |= {"bytes": status.st_size, "modified": status.st_mtime_ns}
    return version
