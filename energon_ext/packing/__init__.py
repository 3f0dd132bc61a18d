# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Documents to fixed-length rows, on lengths alone.

A packer takes documents as opaque handles with a length in tokens and hands out :class:`RowPlan` s:
which pieces of which documents make the next row. A row of ``T`` positions is cut from up to
``T + 1`` consecutive tokens: the first T are the input, the last T the labels, so a window that is
full trains T transitions. No packer looks at a token, and none drops one:

* :class:`SequentialPacker` lets all documents follow each other in one stream and cuts it into
  windows of T + 1 tokens at stride T. Neighbouring windows share one token, so every transition of
  the stream is trained exactly once.
* :class:`BinPacker` collects a buffer of documents and fills bins of T + 1 tokens with whole
  documents. Longer documents are first cut into pieces of T + 1 tokens that share their boundary
  token, so every transition of every document is trained exactly once.

Documents of token files are not handed over one by one: :class:`BinPlanner` and
:class:`SequentialPlanner` do the same to arrays of documents.

:func:`fill_bins` is what it fills them with; :func:`best_fit_decreasing` and
:func:`first_fit_decreasing` are the classical rules for one closed set of items.
"""

from energon_ext.packing.bins import best_fit_decreasing, cut_into_pieces, first_fit_decreasing
from energon_ext.packing.fill import fill_bins
from energon_ext.packing.packers import BinPacker, Packer, Piece, RowPlan, SequentialPacker
from energon_ext.packing.plans import BinPlanner, Pieces, PlannedRows, Planner, SequentialPlanner

__all__ = [
    "BinPacker",
    "BinPlanner",
    "Packer",
    "Piece",
    "Pieces",
    "PlannedRows",
    "Planner",
    "RowPlan",
    "SequentialPacker",
    "SequentialPlanner",
    "best_fit_decreasing",
    "cut_into_pieces",
    "fill_bins",
    "first_fit_decreasing",
]
