# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Shows one document or many at many positions.

A *content* is a span of a document: K tokens from start t. A *frame* has S positions, with the
content at offset s and filler around it. A run easily has 10^9 pairs (t, s), so they are never
listed: each example is computed from its number.

1. ``selection``: lengths and keys -> chosen documents;
2. ``quotas``: examples per document in an epoch;
3. ``index``: example number -> epoch, place in its random order -> document, its n-th example;
4. ``starts``, ``pairs``: n-th example of a document -> (t, s);
5. ``frames``: rows of a plan; ``reader``: their tokens, weights and positions.
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
