# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Samples of an Energon dataset as units of documents."""

import functools
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.energon.flavors.base_dataset import SavableDataset

from energon_ext.errors import ConfigError
from energon_ext.prepare.documents import Documents, InputDocument, Unit
from energon_ext.samples.bad_samples import BadSamples
from energon_ext.samples.numbered import NumberedSamples, as_worker, key_of

UNIT_SAMPLES = 65_536

#: Number of samples to prefetch.
_READ_AHEAD = 32


@dataclass(frozen=True)
class SampleSource:
    """The samples of one dataset."""

    path: str  # for messages
    version: Mapping[str, Any]  # JSON values that reveal a change of its files
    count: int
    open: Callable[[], SavableDataset]  # called once per unit
    document: Callable[[Any, str], InputDocument]  # takes a sample and its key
    bad: BadSamples  # decides about the errors of decoders and cookers
    #: True: a sample that cannot be used becomes a document with its error, and one excluded by
    #: the split a document without a sample. False: the first is an error in its place, the second
    #: is omitted.
    keeps_damaged: bool = False
    sample_bytes: int = 0  # approximate bytes per sample, for the progress bar


def sample_units(source: SampleSource, size: int | None = None) -> list[Unit]:
    """Return units of all samples of a source, each of ``size`` samples, or UNIT_SAMPLES."""
    size = size or UNIT_SAMPLES
    begins = range(0, source.count, size)
    ranges = [range(begin, min(begin + size, source.count)) for begin in begins]
    version = {"path": source.path, "version": dict(source.version)}
    return [unit_of(source, part, {**version, "range": [part.start, part.stop]}) for part in ranges]


def unit_of(source: SampleSource, numbers: range, description: Mapping[str, Any]) -> Unit:
    """Return a unit of some samples of a source."""
    num_bytes = len(numbers) * source.sample_bytes

    def pick(places: Iterable[int]) -> Documents:
        return _read(source, [numbers[place] for place in places])

    return Unit(description, functools.partial(_read, source, numbers), num_bytes, pick)


def _read(source: SampleSource, numbers: Sequence[int]) -> Documents:
    samples = NumberedSamples(source.open(), source.path)
    for place, number in enumerate(numbers):
        if place + _READ_AHEAD < len(numbers):
            samples.prefetch(numbers[place + _READ_AHEAD])
        with as_worker():
            key, sample = _read_one(samples, source.bad, number)
        if isinstance(sample, Exception) and not source.keeps_damaged:
            yield ConfigError(f"{source.path}: {sample}")
        elif sample is not None or source.keeps_damaged:
            yield source.document(sample, key)


def _read_one(samples: NumberedSamples, bad: BadSamples, number: int) -> tuple[str, Any]:
    """Return the key and the sample with a number; an error is returned in place of the sample."""
    stored = samples.read_stored(number)
    if stored is None:  # excluded by the split
        return str(number), None
    key = key_of(stored)
    try:
        sample = samples.cook(stored)
    except Exception as error:  # a decoder or a cooker may raise anything
        return key, bad.judge(error, key)
    bad.has_worked = True
    if isinstance(sample, Generator):
        raise ConfigError(
            f"{samples.path}: sample {key} becomes several samples; write them as JSON Lines first."
        )
    return key, sample
