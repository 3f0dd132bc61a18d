# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""A packed sequence before it is written."""

from dataclasses import dataclass
from typing import Mapping, Sequence

import numpy as np


@dataclass(slots=True)
class Row:
    """One packed sequence of ``T`` positions, from up to ``T + 1`` tokens.

    A slice of n tokens takes n positions and is one segment. Only a token at index T of the row
    takes no position: it is the label of the last position. Gaps and the rest of the row are
    padding.

    Attributes:
        slices: tokens of each segment in order, integer arrays of any width, none empty.
        source: key of the source.
        documents: number of documents that end in this row.
        label_weights: per slice, float [len(slice)], the weight of predicting each of its tokens,
            or None for ones. None for ones everywhere.
        first_positions: position id of the first token of each slice; None for 0.
        gaps: padding positions before each slice; None for 0.
        log_probs: per slice, float [len(slice)], log-probability of each of its tokens; or None.
        rewards: per slice, or None.
        pairs: per slice, 0.. for the pairs of answers in this row, in order; or None.
        columns: further values by name, per slice: ``[len(slice), *item]`` each, or ``[*item]`` of
            a column per document, or None for fill values; or None. Those that no
            :class:`~energon_ext.batch.columns.Column` describes are float, as log_probs.
        slice_sources: key of each slice, if they differ; each slice then counts as a document. A
            row without slices has an empty list here and is padding.
        slice_documents: with ``slice_sources``, documents that end in each slice; None if one does.
        parts: per slice, ``(n, total)``: its document has ``total`` trained labels, of which ``n``
            come before the slice; None for a whole document. None if all are whole.
        num_tokens: positions with a document; by default the length of all slices, which is one too
            many if the last token is only a label.

    Example:
        >>> row = Row([np.array([5, 6, 7]), np.array([8, 9])], source="web")
        >>> from energon_ext.batch.collate import BatchAssembler
        >>> batch = BatchAssembler(seq_len=6)([row], sources=["web"])
        >>> batch.tokens.tolist(), batch.labels.tolist()
        ([5, 6, 7, 8, 9, 0], [6, 7, 8, 9, 0, 0])
        >>> batch.token_weights.tolist(), batch.cu_seqlens.tolist()
        ([1.0, 1.0, 0.0, 1.0, 0.0, 0.0], [0, 3, 5, 6])
    """

    slices: list[np.ndarray]
    source: str = ""
    documents: int = 0
    label_weights: Sequence[np.ndarray | None] | None = None
    first_positions: Sequence[int] | None = None
    gaps: Sequence[int] | None = None
    log_probs: Sequence[np.ndarray] | None = None
    rewards: Sequence[float] | None = None
    pairs: Sequence[int] | None = None
    slice_sources: Sequence[str] | None = None
    slice_documents: Sequence[int] | None = None
    columns: Mapping[str, Sequence[np.ndarray | None]] | None = None
    parts: Sequence[tuple[int, int] | None] | None = None
    num_tokens: int = -1

    def __post_init__(self) -> None:
        if self.num_tokens < 0:
            self.num_tokens = sum(map(len, self.slices))


def join_rows(rows: Sequence[Row]) -> Row:
    """Join rows of documents, each row of a single source.

    Example:
        >>> web = Row([np.array([5, 6]), np.array([7])], source="web", documents=1)
        >>> row = join_rows([web, Row([np.array([8])], source="code", documents=1)])
        >>> len(row.slices), row.slice_sources, row.slice_documents
        (3, ['web', 'web', 'code'], [1, 0, 1])
    """
    names = dict.fromkeys(name for row in rows for name in row.columns or ())
    joined = Row([], slice_sources=[], slice_documents=[], num_tokens=0)
    weights: list[np.ndarray | None] = []
    parts: list[tuple[int, int] | None] = []
    columns: dict[str, list[np.ndarray | None]] = {name: [] for name in names}
    sources, documents = [], []
    for row in rows:
        count = len(row.slices)
        nothing = [None] * count
        joined.slices += row.slices
        joined.num_tokens += row.num_tokens
        sources += [row.source] * count
        documents += [row.documents] * min(count, 1) + [0] * (count - 1)
        weights += row.label_weights or nothing
        parts += row.parts or nothing
        for name, values in columns.items():
            values += (row.columns or {}).get(name) or nothing
    joined.slice_sources, joined.slice_documents = sources, documents
    joined.label_weights = weights if any(each is not None for each in weights) else None
    joined.parts = parts if any(each is not None for each in parts) else None
    joined.columns = columns or None
    return joined
