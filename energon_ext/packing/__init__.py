# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Documents to rows of a fixed length, on lengths alone.

A row of ``T`` positions is cut from up to ``T + 1`` consecutive tokens: the first T are the input,
the last T the labels, so a row that is full trains T transitions. No packer looks at a token, and
none drops one:

* :class:`SequentialPacker` lets all documents follow each other in one stream and cuts it into
  windows of T + 1 tokens at stride T. Neighbouring windows share one token, so every transition of
  the stream is trained exactly once.
* :class:`BestFitPacker` fills bins of T + 1 tokens with whole documents from a buffer. Longer
  documents are first cut into pieces of T + 1 tokens that share their boundary token, so every
  transition of every document is trained exactly once.

All work on arrays of many documents at once: :class:`Pieces` in, a :class:`PackPlan` out. A new
packer is a subclass of :class:`Packer`; an encoder takes an instance, or the name of one in
``PACKERS``.
"""

from collections.abc import Mapping
from typing import Any

from energon_ext.arguments import choices
from energon_ext.errors import ConfigError
from energon_ext.packing.best_fit import BestFitPacker
from energon_ext.packing.packer import Packer
from energon_ext.packing.pieces import PackPlan, Pieces
from energon_ext.packing.sequential import SequentialPacker

#: Every packer, by its name.
PACKERS: dict[str, type[Packer]] = {each.name: each for each in (BestFitPacker, SequentialPacker)}


def make_packer(name: str | Packer, seq_len: int, **options: Any) -> Packer:
    """Build the packer of a name, or check one that is given.

    Args:
        **options: of the packer; None for its default.

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
                f"packing: a {type(name).__name__} has its own options, and seq_len "
                f"{name.seq_len} of the encoder's {seq_len}; give both there alone."
            )
        return name
    if name not in list(PACKERS):
        raise ConfigError(f"packing: {name!r} found, choose from {choices(name, PACKERS)}")
    known = PACKERS[name].option_names()
    for option in options:
        if option not in known:
            raise ConfigError(
                f"packing={name!r} has no option {option!r}; it has {choices(option, known)}"
            )
    return PACKERS[name](seq_len, **options)


def packing_of(fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of an encoder's fingerprint that say how rows are packed."""
    own = ("seq_len", "alignment", "mask_boundary_loss")
    return {k: v for k, v in fingerprint.items() if k in own or k.startswith("packing")}


def repacking(saved: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """A line for a resume whose fingerprints pack rows by other options; else empty."""
    before, after = packing_of(saved), packing_of(now)
    changed = [
        f"{name} {before.get(name)!r}, now {after.get(name)!r}"
        for name in {**before, **after}
        if before.get(name) != after.get(name)
    ]
    return f"Rows are packed anew from here on: {'; '.join(changed)}." if changed else ""


def saved_packer(fields: Mapping[str, Any]) -> Packer:
    """The packer that the fields of a fingerprint describe.

    Raises:
        ConfigError: it is one of the user's own, or the fields are damaged.
    """
    options = {
        name.removeprefix("packing_"): value
        for name, value in fields.items()
        if name.startswith("packing_")
    }
    alignment = fields.get("alignment", 1)
    options["alignment"] = None if alignment == 1 else alignment
    return make_packer(fields.get("packing", ""), fields.get("seq_len", 0), **options)


__all__ = [
    "PACKERS",
    "BestFitPacker",
    "PackPlan",
    "Packer",
    "Pieces",
    "SequentialPacker",
    "make_packer",
]
