# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Reads and encodes samples by number, each with its own random numbers.

If lengths depend on random choices, a row may be longer than planned. It then keeps every sample
that still fits, in the order of the plan, so that it is the same on every rank and worker.
"""

import contextlib
import inspect
import itertools
import math
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from megatron.energon import SampleDecoder, SkipSample
from megatron.energon.rng import SystemRng
from megatron.energon.task_encoder.base import get_failure_tolerance

from energon_ext.errors import ConfigError, EnergonExtError, SampleError, log_of
from energon_ext.keyed import stable_hash
from energon_ext.samples.numbered import NumberedSamples, key_of
from energon_ext.tokens.documents import Origin

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
    _counts: Counter[str] = field(default_factory=Counter, init=False)  # of samples, by outcome
    #: Failures in a row, each as the type of an error, if there was one, and the reason.
    _failures: list[tuple[str, str]] = field(default_factory=list, init=False)
    _has_worked: bool = field(default=False, init=False)  # the encoder, for some sample

    @property
    def row_bytes(self) -> int:
        samples_per_row = 1 if self.table is None else self.table.samples_per_row
        return math.ceil(self.samples.stored_bytes() * samples_per_row)

    def stored(self, number: int) -> Sequence[Mapping[str, Any]]:
        """Return the files of a sample by extension, per dataset of a join; empty if excluded."""
        sample = self.samples.stored(number)
        return () if sample is None else [part for part in sample.data if part is not None]

    def origin(self, number: int) -> Origin:
        """Return the shard of a sample, its number, and its key."""
        first, *_ = [*self.stored(number), {}]
        key = str(first.get("__key__", "excluded by the split"))
        return Origin(str(first.get("__shard__", "")), number, key)

    def tokens(self, number: int, start: int, stop: int) -> None:
        """Return None: a sample has tokens only after it is encoded."""

    def prefetch(self, rows: Sequence[Any]) -> None:
        """Ask the operating system or the store to prefetch samples."""
        for numbers, *_ in rows:
            for number in numbers:
                self.samples.prefetch(number)

    def read(self, rows: Sequence[Any]) -> list[Any]:
        """Read and encode rows of :data:`~energon_ext.plan.packed_rows.Description`."""
        return [self._read_row(numbers, epoch) for numbers, *_, epoch in rows]

    def _read_row(self, numbers: Sequence[int], epoch: int) -> Any:
        """Return the encoded sample of a row, or its samples packed together."""
        self.encoder.source_key = self.key
        samples, free = [], self._row_tokens
        for number in numbers:
            if (found := self._encoded(number, epoch, free)) is not None:
                sample, tokens = found
                samples.append(sample)
                free -= tokens
        samples = samples or [self._replacement(numbers[0], epoch)]
        return samples[0] if self.table is None else self.encoder.pack_selected_samples(samples)

    @property
    def _row_tokens(self) -> int:
        return 0 if self.table is None else int(self.encoder.seq_len)

    def _replacement(self, number: int, epoch: int) -> Any:
        for attempt in range(self._tolerance):
            draw = stable_hash(f"{self.seed}/{self.key}/{number}/{epoch}/{attempt}")
            chosen = self.numbers[draw % len(self.numbers)]
            if chosen in self.excluded:
                continue
            if (found := self._encoded(chosen, epoch, self._row_tokens)) is not None:
                return found[0]
        raise SampleError(
            f"{self.key}: {len(self._failures)} samples in a row cannot be used, the first: "
            f"{self._failures[0][1]}{self._explanation()}"
        )

    def _explanation(self) -> str:
        """Name the decoder if samples in a row all failed with the same type of error."""
        (error, *others) = {error for error, _ in self._failures}
        if others or error in ("", SkipSample.__name__):
            return ""
        return (
            f" All failed with {error}: {describe_decoder(self.encoder)}; set `decoder` in the "
            f"encoder if its methods expect something else."
        )

    @property
    def _tolerance(self) -> int:
        default = getattr(self.encoder, "__default_failure_tolerance__", _TOLERANCE)
        return get_failure_tolerance(self.encoder.encode_sample, default) or _TOLERANCE

    def _encoded(self, number: int, epoch: int, free: int) -> tuple[Any, int] | None:
        """Read and encode a sample; None if it cannot be used or has more than ``free`` tokens."""
        stored = self.samples.stored(number)
        if stored is None:
            self._failures.append(("", "The split excludes it."))
            return None
        try:
            with keyed_random(self.encoder, f"{self.seed}/{self.key}/{number}/{epoch}"):
                sample = encoded(self.encoder, self.samples.cooked(stored))
                tokens = self._tokens_of(sample)
            self._has_worked = True
        except SampleError as error:
            self._has_worked = True
            self._note("skipped", number, f"Sample {key_of(stored)}: {error}")
        except EnergonExtError:
            raise
        except Exception as error:  # from a decoder, a cooker or an encoder, including SkipSample
            self._has_worked |= not isinstance(error, _CODE_ERRORS)
            failed = self._counts["skipped"] + 1
            if not self._has_worked and failed >= min(_FIRST_SAMPLES, self._tolerance):
                decoder = describe_decoder(self.encoder)
                logger.error("%s: the first %d samples all fail: %s.", self.key, failed, decoder)
                raise
            # Some of Energon's errors have a cause but no text.
            reason = " ".join(str(error).split()) or type(error.__cause__ or error).__name__
            reason = f"Sample {key_of(stored)}: {type(error).__name__} ({reason})."
            self._note("skipped", number, reason, type(error).__name__)
        else:
            if tokens <= free:
                self._failures.clear()
                return sample, tokens
            self._note("left out of its row", number, self._overflow(stored, number, tokens, free))
        return None

    def _tokens_of(self, sample: Any) -> int:
        """Return the tokens of an encoded sample; 0 if rows are samples."""
        if self.table is None:
            return 0
        length = self.encoder.length_of(sample)
        return int(length[0] if isinstance(length, tuple) else length)

    def _overflow(self, stored: Any, number: int, tokens: int, free: int) -> str:
        measured = int(self.table.lengths(np.array([number]))[0])
        return (
            f"Sample {key_of(stored)}: {tokens} tokens, {measured} when measured, and the row has "
            f"{free} left. If lengths are random, let length_of return the largest one."
        )

    def _note(self, outcome: str, number: int, reason: str, error: str = "") -> None:
        """Log the 1st, 10th, 100th ... sample with an outcome, named as in `exclude`."""
        self._counts[outcome] += 1
        self._failures.append((error, reason))
        count = self._counts[outcome]
        if str(count).strip("0") == "1":
            name = f"{self.key}:{number}"
            logger.warning("%s: sample %s (%d so far): %s", name, outcome, count, reason)


def encoded(encoder: Any, sample: Any) -> Any:
    """Encode a cooked sample with all of an encoder's methods for a single sample."""
    for name in ("preencode_sample", "encode_sample", "postencode_sample"):
        result = getattr(encoder, name)(sample)
        sample = _only(encoder, name, sample, result) if inspect.isgenerator(result) else result
    return sample


def describe_decoder(encoder: Any) -> str:
    """Say what an encoder's methods get of the files of a sample, to explain their errors."""
    decoder = getattr(encoder, "decoder", None)
    if decoder is None:
        return "the files of a sample are not decoded, as the encoder's `decoder` is None"
    name = type(decoder).__name__
    if isinstance(decoder, SampleDecoder) and "image_decode" in (options := decoder.config()):
        name += f"(image_decode={options['image_decode']!r})"
    return f"the files of a sample are decoded by {name}"


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
