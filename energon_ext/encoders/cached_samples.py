# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The cache of the samples of a source, in a folder named after all that it depends on."""

import dataclasses
import functools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from megatron.energon import TaskEncoder

from energon_ext.config.mix import Entry
from energon_ext.data_files import CACHE_VARIABLE, cache_path
from energon_ext.encoders.sources import open_alone
from energon_ext.errors import ConfigError, EncoderNeededError, SampleError
from energon_ext.prepare.cache import SPLIT, Cached
from energon_ext.prepare.documents import InputDocument
from energon_ext.prepare.job import Encoded, Job
from energon_ext.prepare.samples import SampleSource
from energon_ext.samples.bad_samples import BadSamples
from energon_ext.samples.methods import refuse_to_encode
from energon_ext.samples.stored_files import (
    fingerprint_files,
    num_samples,
    parts_of,
    times_of_files,
)
from energon_ext.storage.object_store import file_name

_Result = TypeVar("_Result")


def sample_source(
    encoder: TaskEncoder,
    entry: Entry,
    document: Callable[[Any, str], InputDocument],
    **options: Any,
) -> SampleSource:
    """Return the samples of a source, cooked by the encoder's cookers but not yet encoded."""
    source = stored_source(entry)
    return dataclasses.replace(
        source,
        open=functools.partial(open_alone, encoder, entry),
        document=document,
        bad=BadSamples(source.path, encoder.decoder),
        sample_bytes=source.version.get("bytes", 0) // max(1, source.count),
        **options,
    )


def cached_source(encoder: TaskEncoder, entry: Entry) -> SampleSource:
    """Return the samples of a source, including unusable ones, so that each keeps its number."""

    def document(sample: Any, key: str) -> InputDocument:
        return InputDocument("", key, source.sample_bytes, sample, SPLIT)

    source = sample_source(encoder, entry, document, keeps_damaged=True)
    return source


def stored_source(entry: Entry) -> SampleSource:
    """Return the samples of a source as they are stored; nothing can decode or cook them."""
    files, count = fingerprint_files(entry.dataset), num_samples(entry.dataset)
    path = str(entry.dataset.paths[0])
    version = {**files, "times": times_of_files(entry.dataset)}
    bad = BadSamples(path, None)
    return SampleSource(path, version, count, refuse_to_encode, refuse_to_encode, bad)


def cached_samples(
    entry: Entry,
    source: SampleSource,
    files: Mapping[str, Any],
    *,
    encoding: Any,
    encode: Callable[[Sequence[InputDocument]], Sequence[Encoded | SampleError]] = refuse_to_encode,
    writer: Callable[[Path], Any] = refuse_to_encode,
    meta: Mapping[str, Any] | None = None,
    check: Callable[[], None] = lambda: None,
    seconds: float | None = None,
    **options: Any,
) -> Cached:
    """Return the cache entry for a source, in a folder named after a hash of its dependencies.

    Without ``encode`` and ``writer`` it can be opened, but not made.
    """
    excluded = [sorted(getattr(part, "sample_excludes", ())) for part in parts_of(entry.dataset)]
    dependencies = {
        **files,
        "encoding": encoding,
        "excluded": excluded,
        **({} if entry.text_key is None else {"key": entry.text_key}),
        "subflavors": getattr(entry.dataset, "subflavors", None),
        "aux": sorted(str(store.get_path()) for store in (entry.loaded.aux or {}).values()),
    }
    text = json.dumps(dependencies, sort_keys=True, default=str)
    root = entry.root or entry.dataset.paths[0].parent
    if not root.is_local() and CACHE_VARIABLE not in os.environ:
        raise ConfigError(f"{root}: is not local; set {CACHE_VARIABLE} to a local cache folder.")
    folder = cache_path(Path(file_name(root)), Path(source.path).name, text)
    job = Job(encode, writer, meta or {}, json.loads(text), check=check, keeps_all=True)
    return Cached(
        name=source.path, folder=folder, job=job, count=source.count, seconds=seconds, **options
    )


def use_sample(
    bad: BadSamples, document: InputDocument, use: Callable[[Any], _Result]
) -> _Result | SampleError:
    """Return what is made of a cooked sample, or why it is refused.

    Args:
        bad: decides about errors.
    """
    if isinstance(document.sample, SampleError):
        return document.sample
    try:
        used = use(document.sample)
    except Exception as error:  # an encoder may raise anything, SkipSample included
        return bad.judge(error, document.origin)
    bad.has_worked = True
    return used


def open_cached(cached: Cached) -> Any:
    """Open what is cached of a source, without the encoder that makes it.

    Raises:
        EncoderNeededError: it is not complete.
    """
    if not cached.is_complete:
        raise EncoderNeededError(
            f"{cached.name}: not {cached.verb}, and a state does not contain the encoder; run "
            f"`{cached.command()}` first, or give --encoder."
        )
    return cached.open()
