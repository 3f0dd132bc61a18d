# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Samples of any TaskEncoder by number: which encoders allow it, and how a row is made."""

import contextlib
import copy
import functools
import inspect
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from megatron.energon import DefaultTaskEncoder, TaskEncoder, WorkerConfig
from megatron.energon.rng import SystemRng
from megatron.energon.task_encoder.base import get_failure_tolerance, get_stateless

from energon_ext.arguments import check_integer
from energon_ext.config.mix import Entry
from energon_ext.documents.permutation import stable_hash
from energon_ext.documents.stored_files import fingerprint_files
from energon_ext.encoders.quiet import quiet_energon
from energon_ext.encoders.sources import (
    MOST_PLANNED_BUFFER_DOCS,
    document_range,
    order_of,
    shuffles_over_epochs,
)
from energon_ext.errors import ConfigError, EnergonExtError, SampleError, log_of
from energon_ext.packing import Packer
from energon_ext.plan.dataset import BatchOptions
from energon_ext.prepare.lengths import LengthTable
from energon_ext.samples.numbered import NumberedSamples, key_of
from energon_ext.samples.packers import OnePerRow, OwnPacker, WholePacker
from energon_ext.samples.rows import OneEach, SampleRows

logger = log_of(__name__)

#: Methods that build stages, which a plan has not.
_STAGES = ("build_encode_sample", "build_batch", "build_cook_crude_sample", "_load_dataset")

#: Errors of a sample in a row after which a run ends, unless the encoder says how many.
_TOLERANCE = 100


def obstacle(
    encoder: Any, entries: Sequence[Entry], stages: Mapping[str, Any], repeat: bool
) -> str | None:
    """Why samples have to be streamed; None where they can be planned."""
    if not repeat:
        return "repeat=False reads every sample once, and the last batch may be short"
    if stages.get("batch_size") is None:
        return "without a batch_size there are no batches"
    if stages.get("packing_buffer_size") is not None and not packs_samples(encoder):
        return "packing_buffer_size packs samples whose lengths are known only by reading them"
    for name in _STAGES:
        if getattr(type(encoder), name) is not getattr(TaskEncoder, name):
            return f"{name} builds stages of its own"
    if _is_own(encoder, "batch_group_criterion"):
        return "batch_group_criterion asks for one sample after another"
    for name in ("encode_sample", "preencode_sample", "postencode_sample"):
        method = getattr(encoder, name)
        if inspect.isgeneratorfunction(method):
            return f"{name} makes several samples of one"
        if not get_stateless(method):
            return f"{name} is not marked @stateless"
    for entry in entries:
        if not all(path.is_local() for path in entry.dataset.paths):
            return f"the files of {entry.key} are not local"
        if shuffles_over_epochs(entry):
            return f"{entry.key} has a shuffle_over_epochs_multiplier"
        if int(entry.loaded.repetitions or 1) != (entry.loaded.repetitions or 1):
            return f"{entry.key} is repeated {entry.loaded.repetitions} times"
    return None


def _is_own(encoder: Any, name: str) -> bool:
    """Whether an encoder has a method of its own."""
    stock = [getattr(each, name, None) for each in (TaskEncoder, DefaultTaskEncoder)]
    return getattr(type(encoder), name) not in stock


@dataclass
class SampleReader:
    """Reads and encodes samples of a source by number.

    A sample that cannot be used is left out of its row. One that would leave the row empty is
    replaced by another one of the source, the same on every rank and worker.

    Args:
        encoder: of the user.
        key: of the source.
        seed: of the run.
        numbers: of the samples.
        excluded: numbers of those that are not read.
        samples: of the source; their files are opened by each process that reads.
        table: lengths of the samples, where some are packed together.
    """

    encoder: Any
    key: str
    seed: int
    numbers: range
    excluded: frozenset[int]
    samples: NumberedSamples
    table: LengthTable | None = None
    _left_out: int = field(default=0, init=False)
    _reason: str = field(default="", init=False)

    def place_of(self, number: int) -> tuple[str, str]:
        """The shard and the key of a sample, for people."""
        stored = self.samples.stored(number)
        found = {} if stored is None else stored.data[0]
        return str(found.get("__shard__", "")), str(found.get("__key__", "left out by the split"))

    def __call__(self, numbers: Sequence[int], epoch: int) -> Any:
        """The encoded sample of a row, or the samples packed into one."""
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
            self._note(f"Sample {key_of(stored)}: {type(error).__name__} ({reason_of(error)}).")
        return None

    def _check_length(self, number: int, sample: Any) -> None:
        """Refuse a sample that takes more room than its row has for it."""
        if self.table is None:
            return
        tokens = tokens_of(self.encoder.length_of(sample))
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
    """A cooked sample behind all methods that an encoder has for one."""
    return encoder.postencode_sample(encoder.encode_sample(encoder.preencode_sample(sample)))


def reason_of(error: Exception) -> str:
    """What an error says, or the one that it was raised for: some of Energon's say nothing."""
    return " ".join(str(error).split()) or type(error.__cause__ or error).__name__


def tokens_of(found: Any) -> int:
    """Of what a ``length_of`` gives: tokens, or tokens and a cost."""
    return int(found[0] if isinstance(found, tuple) else found)


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
    SystemRng.seed_args = staticmethod(_leave)
    encoder.sample_number = number
    try:
        yield
    finally:
        encoder.sample_number = None
        SystemRng.seed_args = staticmethod(own_seed)
        SystemRng.restore_state(before)


def _leave(*args: Any) -> None:
    """Stands for Energon's seeding while a key decides."""


def sample_rows(
    encoder: Any,
    entry: Entry,
    table: LengthTable | None,
    *,
    worker_config: WorkerConfig,
    repeat: bool,
) -> SampleRows:
    """The rows of one source: a sample each, or samples that are packed by their lengths."""
    factory, seed = entry.dataset, worker_config.seed_offset
    first, stop = document_range(entry, len(factory))
    excluded = frozenset(() if entry.excluded is None else entry.excluded.tolist())
    reader = SampleReader(
        encoder, entry.key, seed, range(first, stop), excluded, _opened(encoder, entry), table
    )
    return SampleRows(
        OneEach(len(factory), fingerprint_files(factory)) if table is None else table,
        reader,
        source=entry.key,
        packer=packer_of(encoder),
        order=order_of(entry, stop - first, seed=seed, repeat=repeat, block=encoder.sample_block),
        buffer_docs=MOST_PLANNED_BUFFER_DOCS,
        first=first,
        excluded=entry.excluded,
    )


def packs_samples(encoder: Any) -> bool:
    """Whether an encoder says how long its samples are, so that some make a row."""
    return hasattr(encoder, "length_of")


def packer_of(encoder: Any) -> Packer:
    """What packs an encoder's samples: its own method, or best fit."""
    if getattr(encoder, "saved_packer", None) is not None:
        return encoder.saved_packer
    if not packs_samples(encoder):
        return OnePerRow()
    for name in ("seq_len", "pack_selected_samples"):
        if not hasattr(encoder, name) or (name != "seq_len" and not _is_own(encoder, name)):
            raise ConfigError(
                f"{type(encoder).__qualname__}: a length_of and no {name}; samples are packed "
                f"into rows of `seq_len` positions, and `pack_selected_samples` makes a row."
            )
    check_integer(f"{type(encoder).__qualname__}.seq_len", encoder.seq_len, 2)
    if _is_own(encoder, "select_samples_to_pack"):
        return OwnPacker(encoder.seq_len, select=encoder.select_samples_to_pack)
    return WholePacker(encoder.seq_len)


def _opened(encoder: Any, entry: Entry) -> NumberedSamples:
    """The samples of a source, as on one rank without workers."""
    alone = WorkerConfig(rank=0, world_size=1, num_workers=0)
    own = copy.copy(entry.loaded)
    own.dataset = copy.copy(entry.dataset)
    own.dataset.worker_config = alone
    with quiet_energon():
        dataset = encoder._load_dataset(own, 0, worker_config=alone)
    return NumberedSamples(dataset, str(entry.dataset.paths[0]))


def sample_batches(encoder: Any) -> BatchOptions:
    """How samples become batches: by the encoder's own methods."""
    return BatchOptions(
        assemble=functools.partial(_assemble, encoder),
        padding=None,
        fingerprint=encoder.state_fingerprint(),
        encoder=saved_samples(encoder),
    )


def saved_samples(encoder: Any) -> dict[str, Any]:
    """What plans the same rows again without the user's code, as JSON values."""
    is_packing = packs_samples(encoder)
    return {
        "class": "samples",
        "fingerprint": encoder.state_fingerprint(),
        "lengths": identity_of_lengths(encoder) if is_packing else None,
        "packer": {**packer_of(encoder).to_json(), "seq_len": encoder.seq_len}
        if is_packing
        else None,
    }


def identity_of_lengths(encoder: Any) -> dict[str, Any]:
    """JSON values by which the tables of an encoder are told from those of others.

    Raises:
        ConfigError: the encoder says nothing by which its tables are told apart.
    """
    if getattr(encoder, "saved_lengths", None) is not None:
        return encoder.saved_lengths
    name, own = type(encoder).__qualname__, getattr(encoder, "encoding_fingerprint", None)
    if own is None:
        raise ConfigError(
            f"{name}: has a length_of; give the class an encoding_fingerprint as well, JSON "
            f"values such as {{'version': 1}}, and change it whenever the length of a sample "
            f"changes. Lengths are kept, and found by it."
        )
    return {"class": name, "own": own}


def _assemble(encoder: Any, samples: list[Any]) -> Any:
    return encoder.encode_batch(encoder.batch(samples))
