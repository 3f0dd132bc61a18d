# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Reads and encodes samples by number, each with its own random numbers."""

import contextlib
import inspect
import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from megatron.energon.rng import SystemRng
from megatron.energon.task_encoder.base import get_failure_tolerance

from energon_ext.documents.permutation import stable_hash
from energon_ext.errors import ConfigError, EnergonExtError, SampleError, log_of
from energon_ext.samples.numbered import NumberedSamples, key_of

logger = log_of(__name__)

#: Unusable samples in a row that end a run, unless the encoder sets another limit.
_TOLERANCE = 100

#: Errors that wrong code raises for every sample, and data only for some. They end the run if each
#: of this many first samples raises one; a smaller number would let bad samples end a run.
_CODE_ERRORS, _FIRST_SAMPLES = (NameError, TypeError, AttributeError), 10


@dataclass
class SampleReader:
    """Reads and encodes samples of a source by number.

    A sample that cannot be used is skipped. If this leaves a row empty, another sample of the
    source takes its place, the same one on every rank and worker. Wrong code in the encoder is no
    unusable sample: its error is raised.
    """

    encoder: Any
    key: str  # key of the source
    seed: int
    numbers: range
    excluded: frozenset[int]
    samples: NumberedSamples  # each reading process opens the files itself
    table: Any = None  # lengths of the samples, if several are packed into a row
    _skipped: int = field(default=0, init=False)
    _reasons: list[str] = field(default_factory=list, init=False)  # of failures in a row
    _has_worked: bool = field(default=False, init=False)  # the encoder, for some sample

    def stored(self, number: int) -> Sequence[Mapping[str, Any]]:
        """Return the files of a sample, to display them."""
        sample = self.samples.stored(number)
        return () if sample is None else [part for part in sample.data if part is not None]

    def prefetch(self, numbers: Sequence[int]) -> None:
        """Ask the operating system or the store to prefetch samples."""
        for number in numbers:
            self.samples.prefetch(number)

    def __call__(self, numbers: Sequence[int], epoch: int) -> Any:
        """Return the encoded sample of a row, or its samples packed together."""
        self.encoder.source_key = self.key
        all_samples = [self._encoded(number, epoch) for number in numbers]
        samples = [sample for sample in all_samples if sample is not None]
        samples = samples or [self._replacement(numbers[0], epoch)]
        return samples[0] if self.table is None else self.encoder.pack_selected_samples(samples)

    def _replacement(self, number: int, epoch: int) -> Any:
        for attempt in range(self._tolerance):
            draw = stable_hash(f"{self.seed}/{self.key}/{number}/{epoch}/{attempt}")
            chosen = self.numbers[draw % len(self.numbers)]
            sample = None if chosen in self.excluded else self._encoded(chosen, epoch)
            if sample is not None:
                return sample
        raise SampleError(
            f"{self.key}: {len(self._reasons)} samples in a row cannot be used, the first: "
            f"{self._reasons[0]}"
        )

    @property
    def _tolerance(self) -> int:
        default = getattr(self.encoder, "__default_failure_tolerance__", _TOLERANCE)
        return get_failure_tolerance(self.encoder.encode_sample, default) or _TOLERANCE

    def _encoded(self, number: int, epoch: int) -> Any:
        """Read and encode a sample; None if it cannot be used."""
        stored = self.samples.stored(number)
        if stored is None:
            self._reasons.append("The split excludes it.")
            return None
        try:
            with keyed_random(self.encoder, f"{self.seed}/{self.key}/{number}/{epoch}"):
                sample = encoded(self.encoder, self.samples.cooked(stored))
                self._has_worked = True
                self._check_length(number, sample)
                self._reasons.clear()
                return sample
        except SampleError as error:
            self._has_worked = True
            self._note(number, f"Sample {key_of(stored)}: {error}")
        except EnergonExtError:
            raise
        except Exception as error:  # from a decoder, a cooker or an encoder, including SkipSample
            self._has_worked |= not isinstance(error, _CODE_ERRORS)
            if not self._has_worked and self._skipped + 1 >= min(_FIRST_SAMPLES, self._tolerance):
                raise
            # Some of Energon's errors have a cause but no text.
            reason = " ".join(str(error).split()) or type(error.__cause__ or error).__name__
            self._note(number, f"Sample {key_of(stored)}: {type(error).__name__} ({reason}).")
        return None

    def _check_length(self, number: int, sample: Any) -> None:
        """Raise SampleError if a sample is longer than measured, so its row may overflow."""
        if self.table is None:
            return
        length = self.encoder.length_of(sample)
        tokens = int(length[0] if isinstance(length, tuple) else length)
        measured = int(self.table.locate(np.array([number]))[1][0])
        if tokens > measured:
            raise SampleError(
                f"{tokens} tokens, but {measured} were measured; measure the largest length that "
                f"random choices can produce."
            )

    def _note(self, number: int, reason: str) -> None:
        """Log the 1st, 10th, 100th ... skipped sample, named as in `exclude`."""
        self._skipped += 1
        self._reasons.append(reason)
        if str(self._skipped).strip("0") == "1":
            name = f"{self.key}:{number}"
            logger.warning("%s: sample skipped (%d so far): %s", name, self._skipped, reason)


def encoded(encoder: Any, sample: Any) -> Any:
    """Encode a cooked sample with all of an encoder's methods for a single sample."""
    for name in ("preencode_sample", "encode_sample", "postencode_sample"):
        result = getattr(encoder, name)(sample)
        sample = _only(encoder, name, sample, result) if inspect.isgenerator(result) else result
    return sample


def _only(encoder: Any, name: str, sample: Any, results: Iterator[Any]) -> Any:
    """Return the only sample that a generator yields."""
    samples = list(itertools.islice(results, 2))
    if not samples:
        raise SampleError(f"{name} yields no sample.")
    if len(samples) > 1:
        raise ConfigError(
            f"{type(encoder).__qualname__}.{name} yields several samples for "
            f"{getattr(sample, '__key__', 'one')}, but a plan needs exactly one; set "
            f"plan_samples = False to stream them."
        )
    return samples[0]


@contextlib.contextmanager
def keyed_random(encoder: Any, key: str) -> Iterator[None]:
    """Seed torch, NumPy and ``random`` from a key, and restore their states afterwards.

    ``@stateless(restore_seeds=True)`` would seed them by the number of the worker; in this context
    it has no effect. ``current_sample_index`` is derived from the key. Contexts may be nested.
    """
    number, outer_number = stable_hash(key), encoder.sample_number
    before, own_seed = SystemRng.save_state(), SystemRng.seed_args
    torch.default_generator.manual_seed(number)  # torch.manual_seed would also seed the GPUs
    np.random.seed(number % 2**32)
    random.seed(number)
    SystemRng.seed_args = staticmethod(lambda *_: None)  # disables @stateless in this context
    encoder.sample_number = number
    try:
        yield
    finally:
        encoder.sample_number = outer_number
        SystemRng.seed_args = staticmethod(own_seed)
        SystemRng.restore_state(before)
