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
from energon_ext.errors import ConfigError, StateFormatError
from energon_ext.packing.apart import pack_apart
from energon_ext.packing.best_fit import BestFitPacker
from energon_ext.packing.packer import Packer
from energon_ext.packing.pieces import PackPlan, Pieces
from energon_ext.packing.sequential import SequentialPacker

#: All packers by name.
PACKERS: dict[str, type[Packer]] = {each.name: each for each in (BestFitPacker, SequentialPacker)}


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
    return PACKERS[name](seq_len, **options)


def packing_of(fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of an encoder's fingerprint that determine how rows are packed."""
    names = ("seq_len", "alignment", "mask_boundary_loss")
    return {k: v for k, v in fingerprint.items() if k in names or k.startswith("packing")}


def repacking(saved: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return a log line if a resume changes how rows are packed, else an empty string."""
    before, after = packing_of(saved), packing_of(now)
    changed = [
        f"{name} {before.get(name)!r}, now {after.get(name)!r}"
        for name in {**before, **after}
        if before.get(name) != after.get(name)
    ]
    return f"Rows are packed differently from here on: {'; '.join(changed)}." if changed else ""


def saved_packer(fields: Mapping[str, Any]) -> Packer:
    """Build the packer that the fields of a fingerprint describe.

    Raises:
        ConfigError: the packer is a class of the user's.
        StateFormatError: the fields are damaged.
    """
    if not {"packing", "seq_len"} <= fields.keys():
        raise StateFormatError(f"packing: {fields!r:.80} found; the state is damaged.")
    options = {
        name.removeprefix("packing_"): value
        for name, value in fields.items()
        if name.startswith("packing_")
    }
    alignment = fields.get("alignment", 1)
    options["alignment"] = None if alignment == 1 else alignment
    return make_packer(fields["packing"], fields["seq_len"], **options)


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
