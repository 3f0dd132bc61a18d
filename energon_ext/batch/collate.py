# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Assemble rows into a batch.

Every row becomes a stream of T + 1 tokens: its slices in order, with padding between and after
them. The first T tokens are the model's input, the last T its labels. Weights, log-probabilities
and further columns are streams too: of values that belong to labels the last T are kept, of those
that belong to inputs the first T.
"""

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Mapping, Sequence

import numpy as np

from energon_ext.batch.columns import (
    DOCUMENT_PARTS,
    DOCUMENT_SHARE,
    NO_COLUMNS,
    PARTS,
    RESPONSE_MASK,
    Column,
)
from energon_ext.batch.host_memory import tensors_from
from energon_ext.batch.packed_batch import PackedBatch
from energon_ext.batch.rows import Row
from energon_ext.errors import ConfigError, SampleError

_LOG_PROBS = "log_probs"

#: What is not described: a number per label.
_STREAM = Column(np.dtype(np.float32))

#: First position, reward and pair of a segment that has none of them.
_NO_VALUES = (0, 0.0, -1)


@dataclass(kw_only=True, eq=False)
class BatchAssembler:
    """Writes rows of one length into a :class:`~energon_ext.PackedBatch`.

    Args:
        seq_len: T, positions per row.
        pad_id: token on padding.
        mask_boundary_loss: set the weight to 0 where input and label belong to different segments.
            Otherwise the last token of a segment predicts the first token of the next, unless there
            is a gap between them.
        masked_label: label whose weight is set to 0; None to mask none.
        alignment: every segment begins at a multiple of this many positions. Above 1 the batch has
            ``cu_seqlens_padded``. Context parallelism needs ``2 * context_parallel_size``.
        document_means: add the columns ``document_share`` and ``document_parts``, for losses that
            are averaged by document.

    Raises:
        ConfigError: the row length is not a multiple of the alignment, or ``document_means``
            without ``mask_boundary_loss``.
    """

    seq_len: int = field(kw_only=False)
    pad_id: int = 0
    mask_boundary_loss: bool = True
    masked_label: int | None = None
    alignment: int = 1
    document_means: bool = False

    def __post_init__(self) -> None:
        if self.document_means and not self.mask_boundary_loss:
            raise ConfigError(
                "document_means: the first token of a document would be a label of the one before; "
                "set mask_boundary_loss=True."
            )
        if self.alignment < 1 or self.seq_len % self.alignment:
            raise ConfigError(
                f"alignment: {self.alignment!r} found; the sequence length {self.seq_len} must be "
                f"a multiple of it."
            )

    def fitting(self, row: Row) -> "BatchAssembler":
        """Return an assembler of rows that are as short as one row allows.

        Example:
            >>> row = Row([np.arange(5), np.arange(3)])
            >>> BatchAssembler(64).fitting(row).seq_len  # the last token is only a label
            7
            >>> BatchAssembler(64, alignment=4).fitting(row).seq_len
            12
        """
        end = 0
        for content in row.slices:
            end += -end % self.alignment + len(content)
        longest = max(1, end - 1)
        return dataclasses.replace(self, seq_len=longest + -longest % self.alignment)

    def __call__(
        self,
        rows: Sequence[Row],
        sources: Sequence[str],
        columns: Mapping[str, Column] = NO_COLUMNS,
    ) -> PackedBatch:
        """Assemble a batch.

        Args:
            rows: at least one.
            sources: all keys that rows may have; ``source_ids`` are indices into it.
            columns: those that every batch of the run has, also if its rows lack some.

        Raises:
            SampleError: no rows, an empty row or slice, more than T + 1 tokens and gaps in a row, a
                source that is not in ``sources``, or rewards, log-probabilities or a column in
                only some rows.
        """
        if not rows:
            raise SampleError("A PackedBatch needs at least one row, got none.")
        shape = len(rows), self.seq_len + 1
        tokens = np.full(shape, self.pad_id, np.int64)
        weights = np.ones(shape, np.float32)
        has_rewards = _all_have([row.rewards for row in rows if row.slices], "rewards")
        has_pairs = _all_have([row.pairs for row in rows if row.slices], "pairs")
        columns = {**dict.fromkeys(_names_of_streams(rows, columns), _STREAM), **columns}
        streams = {
            name: column.filled(*shape) for name, column in columns.items() if column.per == "token"
        }
        per_document: dict[str, list[np.ndarray]] = {
            name: [] for name in columns if name not in streams
        }
        segments = _Segments(sources)
        begins = []
        for number, row in enumerate(rows):
            starts = self._write(row, tokens[number], weights[number], segments)
            begins.append(starts)
            if not columns or not starts:
                continue
            own = _streams_of(row)
            for name, stream in streams.items():
                for start, values in zip(starts, own.get(name) or ()):
                    if values is not None:
                        stream[number, start : start + len(values)] = values
            for name, found in per_document.items():
                values_of_slices = own.get(name) or [None] * len(starts)
                for start, values in zip(starts, values_of_slices):
                    if start < self.seq_len:  # else the slice is only a label, and no segment
                        found.append(columns[name].filled() if values is None else values)
        if self.masked_label is not None:
            weights[tokens == self.masked_label] = 0.0
        if self.document_means:
            trained = streams.get(RESPONSE_MASK, weights) != 0
            of_documents = _document_streams(rows, begins, trained)
            streams |= of_documents
            columns |= dict.fromkeys(of_documents, _STREAM)
        first_positions, rewards, pairs = zip(*segments.values)
        lengths = np.array(segments.lengths)
        ends = lengths.cumsum()
        offsets = ends - lengths - first_positions
        arrays = {
            "tokens": tokens[:, :-1],
            "labels": tokens[:, 1:],
            "token_weights": weights[:, 1:],
            "position_ids": np.arange(ends[-1]) - np.repeat(offsets, lengths),
            "cu_seqlens": _int32([0, *ends.tolist()]),
            "source_ids": _int32(segments.sources),
            "source_documents": _int32(segments.documents),
        }
        if self.alignment > 1:
            arrays["cu_seqlens_padded"] = _int32(segments.aligned_ends)
        if has_rewards:
            arrays["rewards"] = np.array(rewards, np.float32)
        if has_pairs:
            arrays["pair_ids"] = _int32(pairs)
        if (log_probs := streams.pop(_LOG_PROBS, None)) is not None:
            arrays[_LOG_PROBS] = log_probs[:, 1:]
        kept = {
            name: stream[:, :-1] if columns[name].at == "input" else stream[:, 1:]
            for name, stream in streams.items()
        }
        for name, values in per_document.items():
            kept[name] = columns[name].filled(len(segments.sources))
            if values:
                kept[name][np.array(segments.sources) >= 0] = values
        written = tensors_from([*arrays.values(), *kept.values()])
        further = {
            name: tensor.reshape(-1, *columns[name].item)
            for name, tensor in zip(kept, written[len(arrays) :])
        }
        return PackedBatch(
            **dict(zip(arrays, written)),
            max_seqlen=int(lengths.max()),
            sources=tuple(sources),
            columns={name: further[name] for name in streams},
            segments={name: further[name] for name in per_document},
            context_size=None,
            row_tokens=self.seq_len,
        )

    def _write(
        self, row: Row, tokens: np.ndarray, weights: np.ndarray, segments: "_Segments"
    ) -> list[int]:
        """Write a row's tokens and weights, append its segments; return the start of each slice."""
        parts, starts, masked, end = [], [], [], 0
        sources, values = segments.sources_of(row), segments.values_of(row)
        for index, content in enumerate(row.slices):
            if not len(content):
                raise SampleError("A row has an empty slice; remove it.")
            start = end + (row.gaps[index] if row.gaps is not None else 0)
            start += -start % self.alignment
            if start > end:
                parts.append(tokens[end:start])
                weights[end:start] = 0.0
                segments.append(min(start, self.seq_len) - end, -1)
            if start > end or self.mask_boundary_loss:
                masked.append(start)
            end = start + len(content)
            parts.append(content)
            starts.append(start)
            # One position less if the last token is only a label.
            segments.append(min(end, self.seq_len) - start, sources[index], values[index])
        is_empty = not starts and row.slice_sources is None
        if is_empty or end > self.seq_len + 1:
            raise SampleError(
                f"A row has {end} tokens and gaps; {self.seq_len} positions take 1 to "
                f"{self.seq_len + 1}."
            )
        if parts:
            np.concatenate(parts, out=tokens[:end], casting="unsafe")
        weights[end:] = 0.0
        for start, own in zip(starts, row.label_weights or ()):
            if own is not None:
                weights[start : start + len(own)] = own
        weights[masked] = 0.0
        segments.append(self.seq_len - end, -1)
        if self.alignment > 1:
            segments.align({*starts, end + -end % self.alignment}, self.seq_len)
        return starts


class _Segments:
    """Segments of a batch, in lists, which are faster than arrays for about fifty entries."""

    def __init__(self, sources: Sequence[str]):
        self.lengths: list[int] = []
        self.sources: list[int] = []  # -1 for padding
        self.values: list[tuple[int, float, int]] = []  # first position, reward, pair
        self._pairs = 0  # in the rows so far
        self.aligned_ends: list[int] = [0]  # each with the padding that aligns the next one
        self.documents = [0] * len(sources)  # per source
        self._index_of = {key: index for index, key in enumerate(sources)}

    def append(self, length: int, source: int, values: tuple[int, float, int] = _NO_VALUES) -> None:
        """Add a segment, unless it has no positions."""
        if length > 0:
            self.lengths.append(length)
            self.sources.append(source)
            self.values.append(values)

    def values_of(self, row: Row) -> list[tuple[int, float, int]]:
        """Return the values of each slice; pairs continue the numbers of earlier rows."""
        count = len(row.slices)
        if row.first_positions is None and row.rewards is None and row.pairs is None:
            return [_NO_VALUES] * count
        firsts = [0] * count if row.first_positions is None else row.first_positions
        rewards = [0.0] * count if row.rewards is None else row.rewards
        if row.pairs is None:
            return list(zip(firsts, rewards, [-1] * count))
        before, self._pairs = self._pairs, self._pairs + max(row.pairs, default=-1) + 1
        return list(zip(firsts, rewards, [pair + before for pair in row.pairs]))

    def align(self, boundaries: set[int], seq_len: int) -> None:
        """Add the boundaries of aligned segments in the next row."""
        base = self.aligned_ends[-1]
        inside = sorted(boundary for boundary in boundaries if 0 < boundary < seq_len)
        self.aligned_ends += [base + boundary for boundary in (*inside, seq_len)]

    def sources_of(self, row: Row) -> list[int]:
        """Return the source index of each slice, and count the documents of the row."""
        try:
            if row.slice_sources is None:
                index = self._index_of[row.source]
                self.documents[index] += row.documents
                return [index] * len(row.slices)
            indices = [self._index_of[key] for key in row.slice_sources]
        except KeyError as error:
            raise SampleError(
                f"A row has source {error}, but the batch has {list(self._index_of)}."
            ) from None
        ended = [1] * len(indices) if row.slice_documents is None else row.slice_documents
        for index, count in zip(indices, ended):
            self.documents[index] += count
        return indices


def _document_streams(
    rows: Sequence[Row], begins: Sequence[Sequence[int]], trained: np.ndarray
) -> dict[str, np.ndarray]:
    """Return what :mod:`energon_ext.losses.documents` needs of each label.

    Args:
        begins: start of each slice, by row.
        trained: which labels are trained, bool [rows, T + 1].
    """
    shares, parts = np.zeros((2, *trained.shape), np.float32)
    for number, (row, starts) in enumerate(zip(rows, begins)):
        for content, start, part in zip(row.slices, starts, row.parts or [None] * len(starts)):
            place = slice(start, start + len(content))
            found = np.flatnonzero(trained[number, place])
            if not len(found):
                continue
            before, total = part or (0, len(found))
            shares[number, place][found] = 1 / total
            # Rounded sums, so that the pieces of a document add up to 1.
            first, stop = (round(PARTS * n / total) for n in (before, before + len(found)))
            parts[number, start + found[0]] = (stop - first) / PARTS
    return {DOCUMENT_SHARE: shares, DOCUMENT_PARTS: parts}


def _streams_of(row: Row) -> Mapping[str, Any]:
    """Return the optional values of a row by name."""
    columns = row.columns or NO_COLUMNS
    return columns if row.log_probs is None else {**columns, _LOG_PROBS: row.log_probs}


def _names_of_streams(rows: Sequence[Row], columns: Mapping[str, Column]) -> list[str]:
    """Return the names of the streams that all rows but padding have, and no column describes."""
    found = [_streams_of(row) for row in rows if row.slices]
    names = dict.fromkeys(name for streams in found for name in streams if name not in columns)
    return [name for name in names if _all_have([streams.get(name) for streams in found], name)]


def _all_have(values: Sequence[Any], name: str) -> bool:
    """Return True if no optional value is None; raise if only some are."""
    present = {value is not None for value in values}
    if len(present) > 1:
        raise SampleError(f"Only some rows of a batch have {name}; give all rows {name} or none.")
    return present == {True}


def _int32(values: Sequence[int]) -> np.ndarray:
    return np.array(values, np.int32)
