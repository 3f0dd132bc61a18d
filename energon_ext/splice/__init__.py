# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""One document or many, presented at many positions.

A *content* is a stretch of a document: K tokens from start t on. A *frame* is S positions with the
content at offset s and filler around it. Nothing here lists the pairs (t, s) of a run, of which
there easily are 10^9: an example is computed from its number.

1. ``selection``: lengths and keys -> the chosen documents;
2. ``quotas``: how many examples of an epoch each document gets;
3. ``index``: number of an example -> epoch, place in the epoch's random order -> document, and
   which of its examples;
4. ``starts``, ``pairs``: which of its examples -> (t, s);
5. ``source``: rows of tokens, weights and positions.
"""

from energon_ext.splice.config import MultiSpliceConfig, SpliceConfig
from energon_ext.splice.index import SpliceIndex
from energon_ext.splice.pairs import Contents
from energon_ext.splice.quotas import document_quotas
from energon_ext.splice.selection import select_documents
from energon_ext.splice.validation import GridIndex, LossMap

__all__ = [
    "Contents",
    "GridIndex",
    "LossMap",
    "MultiSpliceConfig",
    "SpliceConfig",
    "SpliceIndex",
    "document_quotas",
    "select_documents",
]
