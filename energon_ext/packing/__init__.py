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

Both work on arrays of many documents at once: :class:`Pieces` in, a :class:`PackPlan` out.
"""

from energon_ext.packing.best_fit import BestFitPacker
from energon_ext.packing.fill import best_fit_decreasing, fill_bins
from energon_ext.packing.pieces import PackPlan, Pieces
from energon_ext.packing.sequential import SequentialPacker

Packer = BestFitPacker | SequentialPacker

__all__ = [
    "BestFitPacker",
    "PackPlan",
    "Packer",
    "Pieces",
    "SequentialPacker",
    "best_fit_decreasing",
    "fill_bins",
]
