# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Pack documents into rows of a fixed length, from their lengths alone.

A row of ``T`` positions is cut from up to ``T + 1`` tokens: the first T are the input, the last T
the labels, so a full row trains T transitions. Packers never read tokens and never drop one:

* :class:`SequentialPacker` concatenates all documents into one stream and cuts it into windows of
  T + 1 tokens at stride T. Neighbouring windows share one token, so every transition of the stream
  is trained exactly once.
* :class:`BestFitPacker` fills bins of T + 1 tokens with whole documents from a buffer. Longer
  documents are first cut into pieces of T + 1 tokens that share their boundary token, so every
  transition of every document is trained exactly once.

Packers work on arrays of many documents: :class:`Pieces` in, a :class:`PackPlan` out. To add one,
subclass :class:`Packer`; encoders take an instance, or a name from ``PACKERS``.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from energon_ext.arguments import choices
from energon_ext.errors import ConfigError, EncoderNeededError, StateFormatError
from energon_ext.packing.apart import pack_apart
from energon_ext.packing.best_fit import BestFitPacker
from energon_ext.packing.packer import Packer
from energon_ext.packing.pieces import PackPlan, Pieces
from energon_ext.packing.sequential import SequentialPacker
from energon_ext.registry import Registry

#: All packers by name. A module of yours may add its own.
PACKERS = Registry(
    "packer", Packer, **{each.name: each for each in (BestFitPacker, SequentialPacker)}
)


def make_packer(name: str | Packer, seq_len: int, **options: Any) -> Packer:
    """Build a packer by name, or check a given one.

    Args:
        name: a name from ``PACKERS``, or a packer, which must have the same ``seq_len``.
        **options: options of the packer by name; None for the default.

    Example:
        >>> make_packer("bin", 4096, max_docs_per_bin=8).to_json()["max_docs_per_bin"]
        8
        >>> make_packer("sequential", 4096, carry=0.2)
        Traceback (most recent call last):
        energon_ext.errors.ConfigError: packing='sequential' has no option 'carry'; it has none.
    """
    options = {option: value for option, value in options.items() if value is not None}
    if isinstance(name, Packer):
        known = PACKERS.get(name.name, type(name))
        if known is not type(name):
            raise ConfigError(
                f"packing: a {type(name).__name__} has the name {name.name!r} of "
                f"{known.__name__}, by which states would find that; give it a `name` of its own."
            )
        if options or name.seq_len != seq_len:
            raise ConfigError(
                f"packing: give options to the {type(name).__name__} itself, and the same seq_len "
                f"to it ({name.seq_len}) and to the encoder ({seq_len})."
            )
        return name
    if name not in list(PACKERS):
        raise ConfigError(f"packing: {name!r} found, choose from {choices(name, PACKERS)}")
    known = [field.name for field in fields(PACKERS[name]) if field.name != "seq_len"]
    for option in options:
        if option not in known:
            raise ConfigError(
                f"packing={name!r} has no option {option!r}; it has {choices(option, known)}"
            )
    packer: Packer = PACKERS[name](seq_len, **options)
    return packer


def build_packer(packer_class: type[Packer], row_tokens: int, options: Mapping[str, Any]) -> Packer:
    """Build a packer of a class with saved options; StateFormatError if it has no such option."""
    known = [field.name for field in fields(packer_class) if field.name != "seq_len"]
    for option in options:
        if option not in known:
            raise StateFormatError(f"packer: no option {option!r}; the state is damaged.")
    return packer_class(row_tokens, **options)


def load_packer(
    packer: Mapping[str, Any], row_tokens: int, current: Packer | None = None
) -> Packer:
    """Build a packer from its own JSON.

    Args:
        row_tokens: positions of its rows.
        current: a packer of a class that is not in ``PACKERS``, if it may be of that.

    Raises:
        EncoderNeededError: no packer has this name here.
        ConfigError: an option is out of range.
    """
    options = dict(packer)
    name = options.pop("name", None)
    if current is not None and name == current.name:
        return build_packer(type(current), row_tokens, options)
    if name not in list(PACKERS):
        raise EncoderNeededError(
            f"The rows of this run were packed by a packer {name!r}, which is not registered here; "
            f"give --module with the module that does, or --encoder."
        )
    return make_packer(name, row_tokens, **options)


__all__ = [
    "PACKERS",
    "BestFitPacker",
    "PackPlan",
    "Packer",
    "Pieces",
    "SequentialPacker",
    "make_packer",
    "pack_apart",
]
