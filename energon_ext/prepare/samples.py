# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Samples of an Energon dataset by number, as units of documents."""

import functools
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any

from megatron.energon import SkipSample
from megatron.energon.flavors.base_dataset import SavableDataset
from webdataset.autodecode import DecodingError  # type: ignore[import-untyped]

from energon_ext.errors import LEFT_OUT, ConfigError, EnergonExtError, SampleError
from energon_ext.prepare.documents import Documents, InputDocument, Unit
from energon_ext.samples.numbered import NumberedSamples, as_worker, key_of

UNIT_SAMPLES = 65_536

#: Samples that a store is asked for before they are needed.
_READ_AHEAD = 32


@dataclass(frozen=True)
class SampleSource:
    """The samples of one dataset."""

    path: str  # for messages
    version: Mapping[str, Any]  # JSON values by which a change of its files is noticed
    count: int
    open: Callable[[], SavableDataset]  # each unit opens its own
    document: Callable[[Any, str], InputDocument]  # of a sample and its key
    #: A sample that cannot be used is a document with its error, one that the split excludes a
    #: document without a sample; else the first is an error, the second left out.
    keeps_damaged: bool = False
    sample_bytes: int = 0  # of a sample, about, for the progress


def sample_units(source: SampleSource) -> list[Unit]:
    """All samples of a source, in ranges."""
    begins = range(0, source.count, UNIT_SAMPLES)
    ranges = [range(begin, min(begin + UNIT_SAMPLES, source.count)) for begin in begins]
    version = {"path": source.path, "version": dict(source.version)}
    return [unit_of(source, own, {**version, "range": [own.start, own.stop]}) for own in ranges]


def unit_of(source: SampleSource, numbers: range, description: Mapping[str, Any]) -> Unit:
    """Some samples of a source as a unit."""
    num_bytes = len(numbers) * source.sample_bytes
    return Unit(description, functools.partial(_read, source, numbers), num_bytes)


def _read(source: SampleSource, numbers: range) -> Documents:
    samples = NumberedSamples(source.open(), source.path)
    for number in numbers:
        if number + _READ_AHEAD in numbers:
            samples.announce(number + _READ_AHEAD)
        with as_worker():
            key, sample = _read_one(samples, number)
        if isinstance(sample, Exception) and not source.keeps_damaged:
            raise ConfigError(f"{source.path}: {sample}") from sample
        if sample is not None or source.keeps_damaged:
            yield source.document(sample, key)


def _read_one(samples: NumberedSamples, number: int) -> tuple[str, Any]:
    """The key and the sample of a number; the sample is its error where it has one."""
    stored = samples.stored(number)
    if stored is None:  # excluded by the split
        return str(number), None
    key = key_of(stored)
    try:
        sample = samples.cooked(stored)
    except SampleError as error:  # of a cooker, which names the sample
        return key, error
    except (SkipSample, DecodingError, *LEFT_OUT) as error:
        reason = error.__cause__ or error  # the errors of decoders have no text of their own
        return key, SampleError(f"Sample {key}: {type(error).__name__} ({reason}).")
    except EnergonExtError:
        raise
    except Exception as error:  # whatever a loader or a cooker raises
        where = f"{samples.path}: {type(error).__name__} in sample {key}"
        raise ConfigError(f"{where}: {error}.") from error
    if isinstance(sample, Generator):
        raise ConfigError(
            f"{samples.path}: several samples are made of one; write them as JSON Lines first."
        )
    return key, sample
