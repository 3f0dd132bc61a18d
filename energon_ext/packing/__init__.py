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


__all__ = [
    "PACKERS",
    "BestFitPacker",
    "PackPlan",
    "Packer",
    "Pieces",
    "SequentialPacker",
    "make_packer",
]
