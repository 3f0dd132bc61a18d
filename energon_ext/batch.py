# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""One batch contract for pretraining, fine-tuning and reinforcement learning.

A :class:`Row` is one packed sequence of a fixed number of positions from one source. A
:class:`PackedBatch` is a stack of rows as flat, contiguous tensors: what the task wants from the
loss stands in ``token_weights``, so a training step never asks which task it is.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Sequence

import numpy as np
import torch

from energon_ext.errors import SampleError


@dataclass(slots=True)
class Row:
    """One packed sequence of ``T`` positions from one source.

    Attributes:
        tokens: int64 [T], model input.
        labels: int64 [T], the target at each position (already shifted).
        token_weights: float32 [T], weight of the loss at each position.
        position_ids: int64 [T].
        segment_lengths: lengths of the segments in order; they sum to ``T - padding``.
        padding: number of positions at the end that hold no document.
        source: key of the source, set by the choice.
        documents: documents that end in this row.
    """

    tokens: np.ndarray
    labels: np.ndarray
    token_weights: np.ndarray
    position_ids: np.ndarray
    segment_lengths: list[int]
    padding: int = 0
    source: str = ""
    documents: int = 0

    @property
    def num_tokens(self) -> int:
        """Positions that hold a document."""
        return len(self.tokens) - self.padding


@dataclass
class PackedBatch:
    """A batch of packed rows as flat tensors; ``N`` positions, ``n`` segments.

    Attributes:
        tokens: int64 [N], model input.
        labels: int64 [N], the target at position i; Megatron-core's GPTModel does not shift.
        token_weights: float32 [N], weight of the loss at position i. 0 on padding, where the label
            belongs to another document and wherever the task masks; negative where a policy
            gradient pushes away.
        position_ids: int64 [N], 0.. in each segment.
        cu_seqlens: int32 [n + 1], segment ends; first 0, last N. Padding is its own segment.
        max_seqlen: length of the longest segment.
        source_ids: int32 [n], index into ``sources`` of each segment, -1 for padding.
        sources: keys of the sources a batch of this run may hold.
        source_documents: int32 [len(sources)], documents of each source that end in this batch.
        cu_seqlens_padded: int32 [m + 1] or None. Set when segments are aligned for context
            parallelism: ends of the segments, each with the padding that aligns the next one.
        log_probs: float32 [N] or None, log-probabilities of a sampler, for metrics only.
        rewards: float32 [n] or None, reward of each segment, for metrics only.

    Example:
        >>> row = Row(
        ...     tokens=np.array([5, 6, 7, 0]), labels=np.array([6, 7, 0, 0]),
        ...     token_weights=np.array([1, 1, 0, 0], dtype=np.float32),
        ...     position_ids=np.array([0, 1, 2, 0]), segment_lengths=[3], padding=1,
        ...     source="web", documents=1)
        >>> batch = PackedBatch.from_rows([row, row], sources=("code", "web"))
        >>> batch.cu_seqlens.tolist(), batch.source_ids.tolist()
        ([0, 3, 4, 7, 8], [1, -1, 1, -1])
        >>> batch.tokens_per_source()
        {'web': 6}
        >>> batch.grid(1, 2, 4)["segment_ids"].tolist()
        [[[1, 1, 1, 0], [1, 1, 1, 0]]]
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    token_weights: torch.Tensor
    position_ids: torch.Tensor
    cu_seqlens: torch.Tensor
    max_seqlen: int
    source_ids: torch.Tensor
    sources: tuple[str, ...]
    source_documents: torch.Tensor
    cu_seqlens_padded: torch.Tensor | None = None
    log_probs: torch.Tensor | None = None
    rewards: torch.Tensor | None = None

    @classmethod
    def from_rows(cls, rows: Sequence[Row], sources: Sequence[str]) -> "PackedBatch":
        """Stack rows of equal length.

        Args:
            rows: at least one; all of the same number of positions.
            sources: every key a row may name; fixes the meaning of ``source_ids``.

        Raises:
            SampleError: no rows, rows of different lengths, or a source not in ``sources``.
        """
        if not rows:
            raise SampleError("A PackedBatch needs at least one row, got none.")
        index_of = {key: index for index, key in enumerate(sources)}
        row_length = len(rows[0].tokens)
        lengths: list[int] = []
        source_ids: list[int] = []
        documents = [0] * len(index_of)
        for row in rows:
            if len(row.tokens) != row_length:
                raise SampleError(
                    f"Rows of one batch must have one length, got {row_length} and "
                    f"{len(row.tokens)}."
                )
            if row.source not in index_of:
                raise SampleError(
                    f"Row of source {row.source!r}, but the batch knows {list(sources)}."
                )
            source = index_of[row.source]
            lengths.extend(row.segment_lengths)
            source_ids.extend([source] * len(row.segment_lengths))
            if row.padding:
                lengths.append(row.padding)
                source_ids.append(-1)
            documents[source] += row.documents
        cu_seqlens = np.zeros(len(lengths) + 1, dtype=np.int32)
        np.cumsum(lengths, out=cu_seqlens[1:])
        return cls(
            tokens=_stack([row.tokens for row in rows], np.int64),
            labels=_stack([row.labels for row in rows], np.int64),
            token_weights=_stack([row.token_weights for row in rows], np.float32),
            position_ids=_stack([row.position_ids for row in rows], np.int64),
            cu_seqlens=torch.from_numpy(cu_seqlens),
            max_seqlen=max(lengths),
            source_ids=torch.tensor(source_ids, dtype=torch.int32),
            sources=tuple(sources),
            source_documents=torch.tensor(documents, dtype=torch.int32),
        )

    @property
    def num_tokens(self) -> int:
        """Positions in the batch, padding included (``N``)."""
        return self.tokens.numel()

    def segment_lengths(self) -> torch.Tensor:
        """int32 [n], length of each segment, padding segments included."""
        return self.cu_seqlens[1:] - self.cu_seqlens[:-1]

    def segment_sources(self) -> torch.Tensor:
        """int64 [N], index into ``sources`` at each position, -1 on padding."""
        return torch.repeat_interleave(self.source_ids.long(), self.segment_lengths().long())

    def padding_mask(self) -> torch.Tensor:
        """bool [N], True on padding."""
        return self.segment_sources() < 0

    def tokens_per_source(self) -> dict[str, int]:
        """Positions of each source that is present, padding left out."""
        counts = torch.zeros(len(self.sources) + 1, dtype=torch.int64)
        counts.index_add_(0, self.source_ids.long().cpu() + 1, self.segment_lengths().long().cpu())
        return {
            key: int(count) for key, count in zip(self.sources, counts[1:].tolist()) if count > 0
        }

    def documents_per_source(self) -> dict[str, int]:
        """Documents of each source that end in this batch, sources with none left out."""
        return {
            key: int(count)
            for key, count in zip(self.sources, self.source_documents.tolist())
            if count > 0
        }

    def grid(
        self,
        accumulation: int,
        rows: int,
        row_length: int,
        dtype: torch.dtype = torch.int64,
    ) -> dict[str, torch.Tensor]:
        """The batch as ``[A, B, T]`` arrays.

        Args:
            accumulation: A, micro-batches per step.
            rows: B, rows per micro-batch.
            row_length: T, positions per row.
            dtype: ``torch.int64`` gives views of this batch, ``torch.int32`` copies.

        Returns:
            ``input_ids``, ``labels``, ``segment_ids`` (1.. in each row, 0 = padding) and
            ``attention_mask`` (bool, False on padding), each [A, B, T].

        Raises:
            SampleError: A·B·T is not the number of positions.
        """
        shape = (accumulation, rows, row_length)
        if accumulation * rows * row_length != self.num_tokens:
            raise SampleError(
                f"grid{shape} needs {accumulation * rows * row_length} positions, "
                f"the batch has {self.num_tokens}."
            )
        segment_of_position = torch.repeat_interleave(
            torch.arange(len(self.source_ids), device=self.tokens.device),
            self.segment_lengths().long(),
        ).view(accumulation * rows, row_length)
        segment_ids = segment_of_position - segment_of_position[:, :1] + 1
        not_padding = ~self.padding_mask().view_as(segment_ids)
        segment_ids = segment_ids * not_padding
        return {
            "input_ids": self.tokens.view(shape).to(dtype),
            "labels": self.labels.view(shape).to(dtype),
            "segment_ids": segment_ids.view(shape).to(dtype),
            "attention_mask": not_padding.view(shape),
        }

    def to_megatron(self) -> dict[str, torch.Tensor]:
        """The dictionary Megatron-core steps take, one packed sequence of ``N`` positions.

        Returns:
            ``tokens``, ``labels``, ``loss_mask``, ``position_ids``, ``padding_mask`` as [1, N],
            ``cu_seqlens`` int32 [1, n + 1] and ``max_seqlen`` int32 [1].
        """
        return {
            "tokens": self.tokens[None],
            "labels": self.labels[None],
            "loss_mask": self.token_weights[None],
            "position_ids": self.position_ids[None],
            "padding_mask": self.padding_mask()[None],
            "cu_seqlens": self.cu_seqlens[None],
            "max_seqlen": torch.tensor([self.max_seqlen], dtype=torch.int32),
        }

    def validate(self) -> "PackedBatch":
        """Check every invariant of the contract.

        Returns:
            The batch itself.

        Raises:
            SampleError: names the first invariant that does not hold.
        """
        for name, dtype, length in self._expected_fields():
            value = getattr(self, name)
            if value.dtype != dtype or tuple(value.shape) != (length,):
                raise SampleError(
                    f"PackedBatch.{name} must be {dtype} [{length}], "
                    f"got {value.dtype} {list(value.shape)}."
                )
        broken = self._first_broken_rule()
        if broken:
            raise SampleError(f"PackedBatch breaks its contract: {broken}.")
        return self

    def _first_broken_rule(self) -> str | None:
        lengths = self.segment_lengths()
        if int(self.cu_seqlens[0]) != 0:
            return "cu_seqlens starts at 0"
        if int(self.cu_seqlens[-1]) != self.num_tokens:
            return "cu_seqlens ends at N"
        if not bool((lengths > 0).all()):
            return "every segment has at least one position"
        if self.max_seqlen != int(lengths.max()):
            return "max_seqlen is the longest segment"
        if int(self.source_ids.max()) >= len(self.sources):
            return "source_ids point into sources"
        if int(self.source_ids.min()) < -1:
            return "source_ids are -1 or an index"
        if not bool(torch.isfinite(self.token_weights).all()):
            return "token_weights are finite"
        if bool(self.token_weights[self.padding_mask()].any()):
            return "token_weights are 0 on padding"
        if self.cu_seqlens_padded is not None and not self._aligned_ends_are_ends():
            return "cu_seqlens_padded rises from 0 to N and holds segment ends only"
        return None

    def _aligned_ends_are_ends(self) -> bool:
        padded, ends = self.cu_seqlens_padded, self.cu_seqlens
        return (
            int(padded[0]) == 0
            and int(padded[-1]) == self.num_tokens
            and bool((padded.diff() > 0).all())
            and bool(torch.isin(padded, ends).all())
        )

    def _expected_fields(self):
        num_segments = len(self.cu_seqlens) - 1
        yield "tokens", torch.int64, self.num_tokens
        yield "labels", torch.int64, self.num_tokens
        yield "token_weights", torch.float32, self.num_tokens
        yield "position_ids", torch.int64, self.num_tokens
        yield "cu_seqlens", torch.int32, num_segments + 1
        yield "source_ids", torch.int32, num_segments
        yield "source_documents", torch.int32, len(self.sources)
        if self.cu_seqlens_padded is not None:
            yield "cu_seqlens_padded", torch.int32, len(self.cu_seqlens_padded)
        if self.log_probs is not None:
            yield "log_probs", torch.float32, self.num_tokens
        if self.rewards is not None:
            yield "rewards", torch.float32, num_segments

    def _map_tensors(self, function) -> "PackedBatch":
        return dataclasses.replace(
            self,
            **{
                field.name: function(value)
                for field in dataclasses.fields(self)
                if isinstance(value := getattr(self, field.name), torch.Tensor)
            },
        )

    def pin_memory(self, device=None) -> "PackedBatch":
        """A copy in page-locked memory; what the data loader calls when there is a GPU."""
        return self._map_tensors(lambda tensor: tensor.pin_memory())

    def to(self, device, non_blocking: bool = True) -> "PackedBatch":
        """A copy on another device."""
        return self._map_tensors(lambda tensor: tensor.to(device, non_blocking=non_blocking))


def _stack(arrays: Sequence[np.ndarray], dtype) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(arrays).astype(dtype, copy=False))
