# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The methods of a TaskEncoder by which its samples are planned, measured and read."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron.energon import DefaultTaskEncoder, TaskEncoder
from megatron.energon.task_encoder.base import get_failure_tolerance, get_stateless

from energon_ext.arguments import check_integer
from energon_ext.errors import ConfigError, EncoderNeededError, SampleError
from energon_ext.packing import Packer
from energon_ext.samples.packers import OnePerRow, OwnPacker, WholePacker

#: Unusable samples in a row that end a run, unless the encoder sets another limit; and if that is
#: 0, which means none in Energon. A source without any usable sample then still ends.
_TOLERANCE, _HIGHEST_TOLERANCE = 100, 1_000_000

#: Methods that build stages, which a plan does not have.
_STAGES = ("build_encode_sample", "build_batch", "build_cook_crude_sample", "_load_dataset")

Method = Callable[..., Any]


def refuse_to_encode(*arguments: Any) -> Any:
    """Raise EncoderNeededError in place of a method of an encoder that is not there."""
    raise EncoderNeededError("A state does not contain the encoder; give --encoder.")


@dataclass(frozen=True, eq=False, kw_only=True)
class SampleMethods:
    """The methods of one encoder; None for those that it lacks.

    Attributes:
        name: name of the encoder's class, for messages.
        packer: packs samples into rows; one sample per row if there is no ``length_of``.
        identity: JSON values that identify cached lengths; None if they are not measured.
        encode: makes an encoded sample of a cooked one, by all methods for a single sample.
        decoder: decodes the files of a sample.
        tolerance: unusable samples in a row that end a run.
        seconds_per_sample: approximate time to encode one on one core; None if unknown.
        length_of, sample_length: the length of an encoded and of a cooked sample, with or without
            its cost.
        pack: builds a row of encoded samples.
        pack_tokens: builds a row of tokens, so that token files may be sources as well.
        tokenizer: of ``pack_tokens``.
        size_of: what an ``interleave`` counts of a streamed sample; None for its tokens.
        unplanned: why the samples cannot be planned by number; None if they can.
    """

    name: str
    packer: Packer
    identity: Mapping[str, Any] | None = None
    encode: Method = field(default=refuse_to_encode)
    decoder: Any = None
    tolerance: int = _TOLERANCE
    seconds_per_sample: float | None = None
    length_of: Method | None = None
    sample_length: Method | None = None
    pack: Method | None = None
    pack_tokens: Method | None = None
    tokenizer: Any = None
    size_of: Method | None = None
    unplanned: str | None = None

    @classmethod
    def of(cls, encoder: TaskEncoder) -> SampleMethods:
        """Find the methods of an encoder.

        Raises:
            ConfigError: it lacks methods or attributes that others need.
        """
        length_of, size_of = _find(encoder, "length_of"), _size_of(encoder)
        packer: Packer = OnePerRow()
        identity = None
        if length_of is not None:
            packer, identity = _packer_of(encoder), _identity_of(encoder)
        default = _find(encoder, "__default_failure_tolerance__")
        default = _TOLERANCE if default is None else default
        return cls(
            name=type(encoder).__qualname__,
            packer=packer,
            identity=identity,
            encode=functools.partial(_encode, encoder),
            decoder=_find(encoder, "decoder"),
            tolerance=get_failure_tolerance(encoder.encode_sample, default) or _HIGHEST_TOLERANCE,
            seconds_per_sample=_find(encoder, "seconds_per_sample"),
            length_of=length_of,
            sample_length=_find(encoder, "sample_length"),
            pack=encoder.pack_selected_samples if identity is not None else None,
            pack_tokens=_find(encoder, "pack_tokens"),
            tokenizer=_find(encoder, "tokenizer"),
            size_of=size_of,
            unplanned=_why_unplanned(encoder, size_of),
        )

    @property
    def are_packed(self) -> bool:
        """True if several samples can share a row."""
        return self.identity is not None

    @property
    def reads_tokens(self) -> bool:
        """True if token files may be sources as well."""
        return self.are_packed and self.pack_tokens is not None


def _find(encoder: TaskEncoder, name: str) -> Any:
    """Return an attribute that an encoder may have, or None."""
    return getattr(encoder, name, None)


def _overrides(encoder: TaskEncoder, name: str) -> bool:
    """Return True if an encoder has a method of its own in place of one of Energon's encoders."""
    originals = [vars(c).get(name) for c in (TaskEncoder, DefaultTaskEncoder)]
    owner = next((c for c in type(encoder).__mro__ if name in vars(c)), None)
    return owner is not None and vars(owner)[name] not in originals


def _size_of(encoder: TaskEncoder) -> Method | None:
    """Return the method of an encoder, unless it is that of future TaskEncoders, which count 1."""
    size, default = _find(encoder, "blend_sample_size"), vars(TaskEncoder).get("blend_sample_size")
    return None if getattr(size, "__func__", size) is default else size


def _why_unplanned(encoder: TaskEncoder, size_of: Method | None) -> str | None:
    """Return why samples of an encoder can only be streamed; None if they can be planned."""
    if size_of is not None:
        return "blend_sample_size needs samples that have been read"
    for name in _STAGES:
        if _overrides(encoder, name):
            return f"{name} builds its own stages"
    if _overrides(encoder, "batch_group_criterion"):
        return "batch_group_criterion groups samples only after they are read"
    for method in (encoder.encode_sample, encoder.preencode_sample, encoder.postencode_sample):
        if not get_stateless(method):
            return f"{method.__name__} is not marked @stateless"
    return None


def _packer_of(encoder: TaskEncoder) -> Packer:
    """Return the packer of samples with lengths: the encoder's own method, or best fit.

    Raises:
        ConfigError: it lacks what else packing needs.
    """
    name, seq_len = type(encoder).__qualname__, _find(encoder, "seq_len")
    if seq_len is None or not _overrides(encoder, "pack_selected_samples"):
        lacking = "seq_len" if seq_len is None else "pack_selected_samples"
        raise ConfigError(
            f"{name}: has length_of but no {lacking}; samples are packed into rows of `seq_len` "
            f"positions, which `pack_selected_samples` builds."
        )
    check_integer(f"{name}.seq_len", seq_len, 2)
    if _overrides(encoder, "select_samples_to_pack"):
        return OwnPacker(seq_len, encoder=encoder)
    return WholePacker(seq_len)


def _identity_of(encoder: TaskEncoder) -> Mapping[str, Any]:
    name, fingerprint = type(encoder).__qualname__, _find(encoder, "encoding_fingerprint")
    if fingerprint is None:
        raise ConfigError(
            f"{name}: has length_of but no encoding_fingerprint; set it to JSON values such as "
            f"{{'version': 1}} and change it whenever the length of a sample changes, because it "
            f"identifies cached lengths."
        )
    return {"class": name, "own": fingerprint}


def _encode(encoder: TaskEncoder, sample: Any) -> Any:
    methods = encoder.preencode_sample, encoder.encode_sample, encoder.postencode_sample
    for method in methods:
        result = method(sample)
        sample = _only(method, sample, result) if inspect.isgenerator(result) else result
    return sample


def _only(method: Method, sample: Any, results: Iterator[Any]) -> Any:
    """Return the only sample that a generator yields."""
    samples = list(itertools.islice(results, 2))
    if not samples:
        raise SampleError(f"{method.__name__} yields no sample.")
    if len(samples) > 1:
        raise ConfigError(
            f"{method.__qualname__} yields several samples for "
            f"{getattr(sample, '__key__', 'one')}, but a plan needs exactly one; set "
            f"plan_samples = False to stream them."
        )
    return samples[0]
