# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Reads and encodes samples by number, with random numbers of their own."""

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

#: Errors of a sample in a row after which a run ends, unless the encoder says how many.
_TOLERANCE = 100


@dataclass
class SampleReader:
    """Reads and encodes samples of a source by number.

    A sample that cannot be used is left out of its row. One that would leave the row empty is
    replaced by another one of the source, the same on every rank and worker.
    """

    encoder: Any
    key: str  # of the source
    seed: int
    numbers: range
    excluded: frozenset[int]
    samples: NumberedSamples  # each process that reads opens their files
    table: Any = None  # lengths of the samples, where some are packed together
    _left_out: int = field(default=0, init=False)
    _reason: str = field(default="", init=False)

    def stored(self, number: int) -> Sequence[Mapping[str, Any]]:
        """The files of a sample, for people."""
        found = self.samples.stored(number)
        return () if found is None else [part for part in found.data if part is not None]

    def announce(self, numbers: Sequence[int]) -> None:
        """Let local files be read ahead."""
        for number in numbers:
            self.samples.announce(number)

    def __call__(self, numbers: Sequence[int], epoch: int) -> Any:
        """The encoded sample of a row, or the samples packed into one."""
        self.encoder.source_key = self.key
        read = [self._usable(number, epoch) for number in numbers]
        found = [sample for sample in read if sample is not None]
        if not found:
            found = [self._replacement(numbers[0], epoch)]
        return found[0] if self.table is None else self.encoder.pack_selected_samples(found)

    def _replacement(self, number: int, epoch: int) -> Any:
        for attempt in range(self._tolerance):
            again = stable_hash(f"{self.seed}/{self.key}/{number}/{epoch}/{attempt}")
            chosen = self.numbers[again % len(self.numbers)]
            sample = None if chosen in self.excluded else self._usable(chosen, epoch)
            if sample is not None:
                return sample
        raise SampleError(
            f"{self.key}: {self._tolerance + 1} samples one after another cannot be used; the "
            f"last: {self._reason} Is this the data of another task?"
        )

    @property
    def _tolerance(self) -> int:
        default = getattr(self.encoder, "__default_failure_tolerance__", _TOLERANCE)
        return get_failure_tolerance(self.encoder.encode_sample, default) or _TOLERANCE

    def _usable(self, number: int, epoch: int) -> Any:
        """An encoded sample; None for one that cannot be used."""
        stored = self.samples.stored(number)
        if stored is None:
            self._reason = "The split excludes them."
            return None
        try:
            with keyed_random(self.encoder, f"{self.seed}/{self.key}/{number}/{epoch}"):
                sample = encoded(self.encoder, self.samples.cooked(stored))
                self._check_length(number, sample)
                return sample
        except SampleError as error:
            self._note(f"Sample {key_of(stored)}: {error}")
        except EnergonExtError:
            raise
        except Exception as error:  # of a decoder, a cooker or an encoder, SkipSample among them
            # Some of Energon's errors have no text, but a cause.
            reason = " ".join(str(error).split()) or type(error.__cause__ or error).__name__
            self._note(f"Sample {key_of(stored)}: {type(error).__name__} ({reason}).")
        return None

    def _check_length(self, number: int, sample: Any) -> None:
        """Refuse a sample that takes more room than its row has for it."""
        if self.table is None:
            return
        found = self.encoder.length_of(sample)
        tokens = int(found[0] if isinstance(found, tuple) else found)
        measured = int(self.table.locate(np.array([number]))[1][0])
        if tokens > measured:
            raise SampleError(
                f"{tokens} tokens, {measured} were measured; measure the largest that random "
                f"choices make of it."
            )

    def _note(self, reason: str) -> None:
        self._left_out += 1
        self._reason = reason
        if str(self._left_out).strip("0") == "1":
            logger.warning("%s: sample left out (%d so far): %s", self.key, self._left_out, reason)


def encoded(encoder: Any, sample: Any) -> Any:
    """Run all of an encoder's methods for a single sample on a cooked one."""
    for name in ("preencode_sample", "encode_sample", "postencode_sample"):
        found = getattr(encoder, name)(sample)
        sample = _only(encoder, name, sample, found) if inspect.isgenerator(found) else found
    return sample


def _only(encoder: Any, name: str, sample: Any, found: Iterator[Any]) -> Any:
    """The one sample of a generator."""
    samples = list(itertools.islice(found, 2))
    if not samples:
        raise SampleError(f"{name} makes no sample of it.")
    if len(samples) > 1:
        raise ConfigError(
            f"{type(encoder).__qualname__}.{name} makes several samples of "
            f"{getattr(sample, '__key__', 'one')}, and a plan has one for each number; set "
            f"plan_samples = False to stream them."
        )
    return samples[0]


@contextlib.contextmanager
def keyed_random(encoder: Any, key: str) -> Iterator[None]:
    """Random numbers of torch, NumPy and ``random`` that depend on a key alone.

    ``@stateless(restore_seeds=True)`` would seed them by the number of the worker; inside, it
    leaves them as they are. ``current_sample_index`` is a number of the key.
    """
    number = stable_hash(key)
    before, own_seed = SystemRng.save_state(), SystemRng.seed_args
    torch.default_generator.manual_seed(number)  # torch.manual_seed would seed the GPU's as well
    np.random.seed(number % 2**32)
    random.seed(number)
    SystemRng.seed_args = staticmethod(lambda *_: None)  # while the key decides
    encoder.sample_number = number
    try:
        yield
    finally:
        encoder.sample_number = None
        SystemRng.seed_args = staticmethod(own_seed)
        SystemRng.restore_state(before)
