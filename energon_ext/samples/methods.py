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
from megatron.energon.task_encoder.base import get_failure_tolerance

from energon_ext.arguments import check_integer
from energon_ext.errors import ConfigError, EncoderNeededError, SampleError
from energon_ext.packing import Packer
from energon_ext.samples.packers import OnePerRow, OwnPacker, WholePacker

#: Unusable samples in a row that end a run, unless the encoder sets another limit; and if that is
#: 0, which means none in Energon. A source without any usable sample then still ends.
_TOLERANCE, _HIGHEST_TOLERANCE = 100, 1_000_000

Method = Callable[..., Any]


def _refuse_to_encode(sample: Any) -> Any:
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
    """

    name: str
    packer: Packer
    identity: Mapping[str, Any] | None = None
    encode: Method = field(default=_refuse_to_encode)
    decoder: Any = None
    tolerance: int = _TOLERANCE
    seconds_per_sample: float | None = None
    length_of: Method | None = None
    sample_length: Method | None = None
    pack: Method | None = None
    pack_tokens: Method | None = None
    tokenizer: Any = None

    @classmethod
    def of(cls, encoder: TaskEncoder) -> SampleMethods:
        """Find the methods of an encoder.

        Raises:
            ConfigError: it lacks methods or attributes that others need.
        """
        packer, identity = packer_of(encoder), None
        if can_pack(encoder):
            identity = _identity_of(encoder)
        default = find(encoder, "__default_failure_tolerance__")
        default = _TOLERANCE if default is None else default
        return cls(
            name=type(encoder).__qualname__,
            packer=packer,
            identity=identity,
            encode=functools.partial(_encode, encoder),
            decoder=find(encoder, "decoder"),
            tolerance=get_failure_tolerance(encoder.encode_sample, default) or _HIGHEST_TOLERANCE,
            seconds_per_sample=find(encoder, "seconds_per_sample"),
            length_of=find(encoder, "length_of"),
            sample_length=find(encoder, "sample_length"),
            pack=encoder.pack_selected_samples if identity is not None else None,
            pack_tokens=find(encoder, "pack_tokens"),
            tokenizer=find(encoder, "tokenizer"),
        )

    @property
    def are_packed(self) -> bool:
        """True if several samples can share a row."""
        return self.identity is not None


def find(encoder: TaskEncoder, name: str) -> Any:
    """Return an attribute that an encoder may have, or None."""
    return getattr(encoder, name, None)


def overrides(encoder: TaskEncoder, name: str) -> bool:
    """Return True if an encoder has a method of its own in place of one of Energon's encoders."""
    originals = [vars(c).get(name) for c in (TaskEncoder, DefaultTaskEncoder)]
    owner = next((c for c in type(encoder).__mro__ if name in vars(c)), None)
    return owner is not None and vars(owner)[name] not in originals


def can_pack(encoder: TaskEncoder) -> bool:
    """Return True if an encoder has sample lengths, so that several samples can share a row."""
    return find(encoder, "length_of") is not None


def packer_of(encoder: TaskEncoder) -> Packer:
    """Return the packer of an encoder's samples: its own method, best fit, or one per row.

    Raises:
        ConfigError: it has lengths, but not what else packing needs.
    """
    if not can_pack(encoder):
        return OnePerRow()
    name, seq_len = type(encoder).__qualname__, find(encoder, "seq_len")
    if seq_len is None or not overrides(encoder, "pack_selected_samples"):
        lacking = "seq_len" if seq_len is None else "pack_selected_samples"
        raise ConfigError(
            f"{name}: has length_of but no {lacking}; samples are packed into rows of `seq_len` "
            f"positions, which `pack_selected_samples` builds."
        )
    check_integer(f"{name}.seq_len", seq_len, 2)
    if overrides(encoder, "select_samples_to_pack"):
        return OwnPacker(seq_len, encoder=encoder)
    return WholePacker(seq_len)


def _identity_of(encoder: TaskEncoder) -> Mapping[str, Any]:
    name, fingerprint = type(encoder).__qualname__, find(encoder, "encoding_fingerprint")
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
