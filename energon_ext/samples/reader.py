# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Reads and encodes samples by number, each with its own random numbers.

If lengths depend on random choices, a row may be longer than planned. It then keeps every sample
that still fits, in the order of the plan, so that it is the same on every rank and worker.
"""

import contextlib
import math
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from megatron.energon import SkipSample
from megatron.energon.rng import SystemRng

from energon_ext.batch.columns import NO_COLUMNS, Column
from energon_ext.errors import SampleError, WrongCodeError, log_of
from energon_ext.keyed import stable_hash
from energon_ext.samples.bad_samples import BadSamples, describe_decoder
from energon_ext.samples.context import encoder_context
from energon_ext.samples.methods import SampleMethods
from energon_ext.samples.numbered import NumberedSamples, key_of
from energon_ext.tokens.documents import FileFacts, Origin

logger = log_of(__name__)


@dataclass
class SampleReader:
    """Reads and encodes samples of a source by number.

    A sample that cannot be used is skipped. If this leaves a row empty, another sample of the
    source takes its place, the same one on every rank and worker.
    """

    methods: SampleMethods
    key: str  # key of the source
    seed: int
    numbers: Sequence[int] | np.ndarray
    excluded: frozenset[int]
    samples: NumberedSamples  # each reading process opens the files itself
    table: Any = None  # lengths of the samples, if several are packed into a row
    _counts: Counter[str] = field(default_factory=Counter, init=False)  # of samples, by outcome
    #: Failures in a row, each as the type of an error, if there was one, and the reason.
    _failures: list[tuple[str, str]] = field(default_factory=list, init=False)
    _bad: BadSamples = field(init=False)

    def __post_init__(self) -> None:
        self._bad = BadSamples(self.key, self.methods.decoder, self.methods.tolerance)

    @property
    def columns(self) -> Mapping[str, Column]:
        """None: the fields of a batch of samples are those of the encoder's own class."""
        return NO_COLUMNS

    @property
    def row_bytes(self) -> int:
        samples_per_row = 1 if self.table is None else self.table.samples_per_row
        return math.ceil(self.samples.stored_bytes() * samples_per_row)

    def read_stored(self, number: int) -> Sequence[Mapping[str, Any]]:
        """Return the files of a sample by extension, per dataset of a join; empty if excluded."""
        sample = self.samples.read_stored(number)
        return () if sample is None else [part for part in sample.data if part is not None]

    def origin(self, number: int) -> Origin:
        """Return the shard of a sample, its number, and its key."""
        first, *_ = [*self.read_stored(number), {}]
        key = str(first.get("__key__", "excluded by the split"))
        return Origin(str(first.get("__shard__", "")), number, key)

    def describe_files(self) -> list[FileFacts]:
        return self.samples.describe_files()

    def tokens(self, number: int, start: int, stop: int) -> None:
        """Return None: a sample has tokens only after it is encoded."""

    def prefetch(self, rows: Sequence[Any]) -> None:
        """Ask the operating system or the store to prefetch samples."""
        for numbers, *_ in rows:
            for number in numbers:
                self.samples.prefetch(number)

    def read(self, rows: Sequence[Any]) -> list[Any]:
        """Read and encode rows of :data:`~energon_ext.plan.packed_rows.Description`."""
        return [self._read_row(numbers, visits) for numbers, _, _, visits, *_ in rows]

    def _read_row(self, numbers: Sequence[int], visits: Sequence[int]) -> Any:
        """Return the encoded sample of a row, or its samples packed together."""
        with encoder_context(source_key=self.key):
            samples = self._read_samples(numbers, visits)
            return samples[0] if self.methods.pack is None else self.methods.pack(samples)

    def _read_samples(self, numbers: Sequence[int], visits: Sequence[int]) -> list[Any]:
        samples, free = [], self._row_tokens
        for number, visit in zip(numbers, visits):
            if (found := self._encode(number, f"{visit}", free)) is not None:
                sample, tokens = found
                samples.append(sample)
                free -= tokens
        return samples or [self._replacement(numbers[0], visits[0])]

    @property
    def _row_tokens(self) -> int:
        return 0 if self.table is None else self.methods.packer.seq_len

    def _replacement(self, number: int, visit: int) -> Any:
        for attempt in range(self.methods.tolerance):
            draw = stable_hash(f"{self.seed}/{self.key}/{number}/{visit}/{attempt}")
            chosen = int(self.numbers[draw % len(self.numbers)])
            if chosen in self.excluded:
                continue
            instead = f"{visit}/instead of {number}"  # unlike the visit of its own in that epoch
            if (found := self._encode(chosen, instead, self._row_tokens)) is not None:
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
            f" All failed with {error}: {describe_decoder(self.methods.decoder)}; set `decoder` in "
            f"the encoder if its methods expect something else."
        )

    def _encode(self, number: int, visit: str, free: int) -> tuple[Any, int] | None:
        """Read and encode a sample; None if it cannot be used or has more than ``free`` tokens.

        Args:
            visit: names this reading of the sample; it selects its random numbers.
        """
        stored = self.samples.read_stored(number)
        if stored is None:
            self._failures.append(("", "The split excludes it."))
            return None
        try:
            with keyed_random(f"{self.seed}/{self.key}/{number}/{visit}"):
                sample = self.methods.encode(self.samples.cook(stored))
                tokens = self._tokens_of(sample)
            self._bad.has_worked = True
        except Exception as error:  # from a decoder, a cooker or an encoder, including SkipSample
            try:
                bad = self._bad.judge(error, key_of(stored))
            except WrongCodeError as wrong:
                logger.error("%s", wrong)
                raise error from error.__cause__  # with its own traceback
            kind = "" if isinstance(error, SampleError) else type(error).__name__
            self._note("skipped", number, str(bad), kind)
        else:
            if tokens <= free:
                self._failures.clear()
                return sample, tokens
            self._note("left out of its row", number, self._overflow(stored, number, tokens, free))
        return None

    def _tokens_of(self, sample: Any) -> int:
        """Return the tokens of an encoded sample; 0 if rows are samples."""
        if self.methods.length_of is None:
            return 0
        length = self.methods.length_of(sample)
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


@contextlib.contextmanager
def keyed_random(key: str) -> Iterator[None]:
    """Seed torch, NumPy and ``random`` from a key, and restore their states afterwards.

    ``@stateless(restore_seeds=True)`` would seed them by the number of the worker; in this context
    it has no effect. ``current_sample_index`` is derived from the key. Contexts may be nested.
    """
    number = stable_hash(key)
    before, own_seed = SystemRng.save_state(), SystemRng.seed_args
    torch.default_generator.manual_seed(number)  # torch.manual_seed would also seed the GPUs
    np.random.seed(number % 2**32)
    random.seed(number)
    SystemRng.seed_args = staticmethod(lambda *_: None)  # disables @stateless in this context
    try:
        with encoder_context(sample_number=number):
            yield
    finally:
        SystemRng.seed_args = staticmethod(own_seed)
        SystemRng.restore_state(before)
