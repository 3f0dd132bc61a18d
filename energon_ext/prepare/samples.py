# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Samples of an Energon dataset as units of documents."""

import functools
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any

from megatron.energon import SkipSample
from megatron.energon.flavors.base_dataset import SavableDataset
from webdataset.autodecode import DecodingError  # type: ignore[import-untyped]

from energon_ext.errors import SKIPPABLE_ERRORS, ConfigError, EnergonExtError, SampleError
from energon_ext.prepare.documents import Documents, InputDocument, Unit
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
    #: True: a sample that cannot be used becomes a document with its error, and one excluded by
    #: the split a document without a sample. False: the first raises, the second is omitted.
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
    return Unit(description, functools.partial(_read, source, numbers), num_bytes)


def _read(source: SampleSource, numbers: range) -> Documents:
    samples = NumberedSamples(source.open(), source.path)
    for number in numbers:
        if number + _READ_AHEAD in numbers:
            samples.prefetch(number + _READ_AHEAD)
        with as_worker():
            key, sample = _read_one(samples, number)
        if isinstance(sample, Exception) and not source.keeps_damaged:
            raise ConfigError(f"{source.path}: {sample}") from sample
        if sample is not None or source.keeps_damaged:
            yield source.document(sample, key)


def _read_one(samples: NumberedSamples, number: int) -> tuple[str, Any]:
    """Return the key and the sample with a number; an error is returned in place of the sample."""
    stored = samples.read_stored(number)
    if stored is None:  # excluded by the split
        return str(number), None
    key = key_of(stored)
    try:
        sample = samples.cook(stored)
    except SampleError as error:  # from a cooker, with the name of the sample
        return key, error
    except (SkipSample, DecodingError, *SKIPPABLE_ERRORS) as error:
        reason = error.__cause__ or error  # errors of decoders have no text
        return key, SampleError(f"Sample {key}: {type(error).__name__} ({reason}).")
    except EnergonExtError:
        raise
    except Exception as error:  # from a loader or a cooker
        where = f"{samples.path}: {type(error).__name__} in sample {key}"
        raise ConfigError(f"{where}: {error}.") from error
    if isinstance(sample, Generator):
        raise ConfigError(
            f"{samples.path}: sample {key} becomes several samples; write them as JSON Lines first."
        )
    return key, sample
