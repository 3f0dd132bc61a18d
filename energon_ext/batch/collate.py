# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Rows into a batch, written once.

A :class:`~energon_ext.Row` writes nothing: it holds slices of token arrays, often views of a memory
map, and says how they lie in its T positions. :class:`BatchAssembler` writes all fields of all rows
of a batch into one buffer:

1. every row becomes a stream of T + 1 tokens, its slices one after another, padding between and
   behind them; the first T are the model's input, the last T its labels;
2. where segments begin and end is known from the lengths alone, so position ids, segment ends,
   sources and the weights that padding and boundaries take away are made for the batch at once.
"""

from dataclasses import dataclass, field
from typing import Sequence

import numpy as np
import torch

from energon_ext.batch.buffer import BatchSizes
from energon_ext.batch.packed_batch import PackedBatch
from energon_ext.batch.rows import Row, RowLayout
from energon_ext.errors import ConfigError, SampleError


@dataclass(kw_only=True, eq=False)
class BatchAssembler:
    """Writes rows of one length into a :class:`~energon_ext.PackedBatch`.

    Args:
        seq_len: T, positions of a row.
        pad_id: token on positions that hold no document.
        mask_boundary_loss: weight 0 where the label is of another segment than the input. Without
            it the last token of a segment is trained on the first of the next one, if that follows
            without a gap.
        masked_label: weight 0 where the label is this id; None to mask none.
        alignment: every segment begins at a multiple of so many positions. Above 1 the batch gets
            ``cu_seqlens_padded``. Context parallelism needs ``2 * context_parallel_size``.

    Raises:
        ConfigError: the row length is not a multiple of the alignment.
    """

    seq_len: int = field(kw_only=False)
    pad_id: int = 0
    mask_boundary_loss: bool = True
    masked_label: int | None = None
    alignment: int = 1

    def __post_init__(self) -> None:
        if self.alignment < 1 or self.seq_len % self.alignment:
            raise ConfigError(
                f"alignment: {self.alignment!r} found; the sequence length {self.seq_len} must be "
                f"a multiple of it."
            )
        self._count_up = np.arange(self.seq_len, dtype=np.int64)

    def __call__(self, rows: Sequence[Row], sources: Sequence[str]) -> PackedBatch:
        """Assemble a batch.

        Args:
            rows: at least one.
            sources: every key a row may name; fixes the meaning of ``source_ids``.

        Raises:
            SampleError: no rows, an empty row or slice, a row of more than T + 1 tokens and gaps,
                or of a source that is not in ``sources``.
        """
        if not rows:
            raise SampleError("A PackedBatch needs at least one row, got none.")
        layout, documents = self._lay_out(rows, sources)
        sizes = BatchSizes(
            positions=len(rows) * self.seq_len,
            segments=len(layout.lengths),
            sources=len(sources),
            aligned_segments=len(layout.aligned_ends) if self.alignment > 1 else None,
            log_probs=rows[0].log_probs is not None,
            rewards=rows[0].rewards is not None,
        )
        buffer = torch.empty(sizes.num_bytes, dtype=torch.uint8)
        batch = PackedBatch.from_buffer(buffer, sizes, tuple(sources), max(layout.lengths))
        fields = {name: getattr(batch, name).numpy() for name, *_ in sizes.fields()}
        fields["cu_seqlens"][0] = 0
        ends = np.cumsum(layout.lengths, out=fields["cu_seqlens"][1:])
        fields["source_ids"][:] = layout.sources
        fields["source_documents"][:] = documents
        self._write_tokens(fields, layout)
        self._write_position_ids(fields["position_ids"], rows, layout)
        self._write_weights(fields, rows, layout, ends)
        if self.alignment > 1:
            fields["cu_seqlens_padded"][0] = 0
            fields["cu_seqlens_padded"][1:] = layout.aligned_ends
        if sizes.log_probs:
            values = [row.log_probs for row in rows]
            fields["log_probs"][:] = self._at_labels(rows, layout, values, missing=0.0)
        if sizes.rewards:
            rewards = _rewards(rows)
            fields["rewards"].fill(0.0)
            for segment, index in layout.segments_of_slices():
                fields["rewards"][segment] = rewards[index]
        return batch

    def _lay_out(self, rows: Sequence[Row], sources: Sequence[str]) -> tuple[RowLayout, list[int]]:
        """Where everything lies, and the documents of each source."""
        layout = RowLayout(self.seq_len, self.alignment)
        index_of = {key: index for index, key in enumerate(sources)}
        documents = [0] * len(index_of)
        try:
            for row in rows:
                if row.slice_sources is None:
                    index = index_of[row.source]
                    layout.add(row, [index] * len(row.slices))
                    documents[index] += row.documents
                else:
                    indices = [index_of[key] for key in row.slice_sources]
                    layout.add(row, indices)
                    for index in indices:
                        documents[index] += 1
        except KeyError as error:
            raise SampleError(
                f"Row of source {error}, but the batch knows {list(sources)}."
            ) from None
        return layout, documents

    def _write_tokens(self, fields: dict[str, np.ndarray], layout: RowLayout) -> None:
        seq_len = self.seq_len
        dtype = layout.slices[0].dtype if layout.slices else np.dtype(np.int64)  # all padding
        if self.pad_id > np.iinfo(dtype).max:
            dtype = np.dtype(np.int64)
        padding = np.full(seq_len + 1, self.pad_id, dtype)
        streams = np.concatenate(layout.fill(layout.slices, padding)).reshape(-1, seq_len + 1)
        fields["tokens"].reshape(-1, seq_len)[:] = streams[:, :seq_len]
        fields["labels"].reshape(-1, seq_len)[:] = streams[:, 1:]

    def _write_position_ids(
        self, position_ids: np.ndarray, rows: Sequence[Row], layout: RowLayout
    ) -> None:
        count_up, lengths = self._count_up, layout.lengths
        if all(row.first_positions is None for row in rows):
            np.concatenate([count_up[:length] for length in lengths], out=position_ids)
            return
        first = [p for row in rows for p in row.first_positions or [0] * len(row.slices)]
        starts = [0] * len(lengths)
        for segment, index in layout.segments_of_slices():
            starts[segment] = first[index]
        stops = [start + length for start, length in zip(starts, lengths)]
        if max(stops) > len(count_up):
            count_up = np.arange(max(stops), dtype=np.int64)
        np.concatenate([count_up[a:b] for a, b in zip(starts, stops)], out=position_ids)

    def _write_weights(
        self,
        fields: dict[str, np.ndarray],
        rows: Sequence[Row],
        layout: RowLayout,
        ends: np.ndarray,
    ) -> None:
        weights = fields["token_weights"]
        if all(row.label_weights is None for row in rows):
            weights.fill(1.0)
        else:
            values = [row.label_weights for row in rows]
            weights[:] = self._at_labels(rows, layout, values, missing=1.0)
        if self.mask_boundary_loss:
            inside = weights[layout.full_rows]
            weights[ends - 1] = 0.0
            weights[layout.full_rows] = inside
        else:
            weights[layout.before_padding] = 0.0
        for start, stop in layout.padding:
            weights[start:stop] = 0.0
        if self.masked_label is not None:
            weights[fields["labels"] == self.masked_label] = 0.0

    def _at_labels(
        self,
        rows: Sequence[Row],
        layout: RowLayout,
        values: Sequence[Sequence[np.ndarray | None] | None],
        missing: float,
    ) -> np.ndarray:
        """Values of tokens, where the tokens are labels: float32 [N], 0 where padding is."""
        filled = [
            np.full(len(tokens), missing, np.float32) if value is None else value
            for row, row_values in zip(rows, values)
            for tokens, value in zip(row.slices, row_values or [None] * len(row.slices))
        ]
        padding = np.zeros(self.seq_len + 1, np.float32)
        stream = np.concatenate(layout.fill(filled, padding))
        return stream.reshape(-1, self.seq_len + 1)[:, 1:].reshape(-1)


def _rewards(rows: Sequence[Row]) -> list[float]:
    """The reward of each slice."""
    rewards: list[float] = []
    for row in rows:
        if row.rewards is None:
            raise SampleError("Some rows of a batch have rewards and some none; give all or none.")
        rewards += row.rewards
    return rewards
